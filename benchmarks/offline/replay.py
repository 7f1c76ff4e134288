"""SGLang's real queue policy, admission, pools and radix cache, driven as its scheduler does, without a model.

For SGLang 0.5.20 and later. The steps of the overlapped scheduler are kept: a prefill's result enters the cache after
the next step has been planned. What is simplified: prefills are not chunked, and requests finish after a fixed output.
"""

from __future__ import annotations

import inspect
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import CUSTOM_PARAMETER, GroupScheduler
from sgl_prefix_attn.sglang_plugin.scheduling.shared_prefill import SharedPrefill
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures
from tests.support.caches import CACHES, GENERATION, Pools

# SGLang's defaults for the share of max_new_tokens that is reserved for running requests (schedule_conservativeness 1).
_RATIO_START, _RATIO_END, _RATIO_STEPS = 0.7, 0.098, 600
_MAX_PREFILL_TOKENS = 16_384
_REFRESH_EVERY, _REFRESHED_REQUESTS = 32, 128
# SGLang's default.
_CACHE = "UnifiedRadixCache" if "UnifiedRadixCache" in CACHES else "tree locks"


@dataclass(frozen=True)
class Job:
    """One request: its prompt, the output it will have, and its place in an offline job (None: plain)."""

    prompt: Sequence[int]
    output: int
    place: list[str | int] | None = None


@dataclass
class Result:
    """What a replay did. `saving` is equation 2: share of prompt tokens that were not computed."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    prefill_steps: int = 0
    most_running: int = 0
    finished: int = 0
    held_back: dict[str, int] = field(default_factory=dict)

    @property
    def saving(self) -> float:
        return 1 - self.computed_tokens / max(1, self.prompt_tokens)


class _Running:
    """What PrefillAdder reads of a ScheduleBatch."""

    def __init__(self) -> None:
        self.reqs: list[Req] = []

    def is_empty(self) -> bool:
        return not self.reqs

    def batch_size(self) -> int:
        return len(self.reqs)


class ReplayError(RuntimeError):
    """The replay cannot go on; says why."""


class Replay:
    """Runs jobs to their end over one cache.

    Args:
        pool: KV tokens.
        max_running: most requests that run at once.
        grouped: with the hooks of group scheduling.
        shared_prefill: with the hook of that setting.
        window: how many requests are handed to the queue at once; None: all.
        queue_policy: SGLang's --schedule-policy.
        eviction: SGLang's --radix-eviction-policy.
        refresh: every 32 rounds of admission, the first 128 waiting requests touch what is cached of their prompts, as
            SGLang 0.5.23 does.
    """

    def __init__(
        self,
        pool: int,
        *,
        max_running: int = 256,
        grouped: bool = False,
        shared_prefill: bool = False,
        window: int | None = None,
        context: int = 32_768,
        queue_policy: str = "fcfs",
        eviction: str = "lru",
        refresh: bool = False,
    ) -> None:
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
        pools = Pools(_CACHE, slots=pool, rows=max_running, context=context, eviction=eviction)
        self.rows, self.allocator, self.tree = pools.pool, pools.allocator, pools.cache
        self.policy = SchedulePolicy(queue_policy, self.tree, False, False, False)
        self.refresh, self._rounds = refresh, 0
        self.pool, self.max_running, self.window = pool, max_running, window
        self.running = _Running()
        self.waiting: list[Req] = []
        self.outputs: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.ratio = _RATIO_START
        self.full = False
        self.result = Result()
        self.failures = Failures()
        self.group_scheduler = GroupScheduler(self.failures)
        self.admission = Admission(self.failures)
        # Without the hooks of a backend that the process has made before.
        self._add: Callable[..., AddReqResult] = inspect.unwrap(PrefillAdder.add_one_req)
        if shared_prefill:
            self.admission.enlist(SharedPrefill(Counters(failures=self.failures)))
        if grouped:
            self.admission.enlist(self.group_scheduler)

    def run(self, jobs: Sequence[Job]) -> Result:
        """Runs all jobs. Raises ReplayError when nothing can be admitted any more, or KV is lost."""
        source = iter(enumerate(jobs))
        prefilled: deque[list[Req]] = deque()  # launched, result not processed
        idle = 0
        while True:
            self._hand_in(source)
            planned = self._admit()
            if prefilled:
                self._prefill_done(prefilled.popleft())
            if planned:
                prefilled.append(planned)
                self.running.reqs += planned
                self.result.prefill_steps += 1
            else:
                self._decode()
            self.result.steps += 1
            if not (self.waiting or self.running.reqs or prefilled):
                break
            idle = 0 if planned or self.running.reqs else idle + 1
            if idle > 3:
                raise ReplayError(f"nothing runs, {len(self.waiting)} requests wait, none is admitted")
        free = self.allocator.available_size() + self.tree.evictable_size()
        if free != self.pool or self.tree.protected_size():
            raise ReplayError(f"{self.pool - free} KV tokens are lost, {self.tree.protected_size()} stay locked")
        self.result.held_back = dict(self.group_scheduler.held_back)
        return self.result

    def _hand_in(self, source: Iterator[tuple[int, Job]]) -> None:
        outstanding = len(self.waiting) + len(self.running.reqs)
        for number, job in source:
            params = {CUSTOM_PARAMETER: job.place} if job.place else None
            sampling = SamplingParams(max_new_tokens=job.output, ignore_eos=True, custom_params=params)
            request = Req(f"r{number}", "", array("q", job.prompt), sampling)
            self.outputs[request.rid] = job.output
            self.waiting.append(request)
            self.result.prompt_tokens += len(job.prompt)
            outstanding += 1
            if self.window is not None and outstanding >= self.window:
                return

    def _admit(self) -> list[Req]:
        if self.full or not self.waiting or len(self.running.reqs) >= self.max_running:
            return []
        self._rounds += 1
        if self.refresh and self._rounds % _REFRESH_EVERY == 0:
            for request in self.waiting[:_REFRESHED_REQUESTS]:
                self.tree.match_prefix(MatchPrefixParams(key=RadixKey(request.origin_input_ids)))
        self.policy.calc_priority(self.waiting, self.running)
        self.admission.after_calc_priority(None, self.policy, self.waiting)
        adder = PrefillAdder(1, self.tree, self.allocator, self.running, self.ratio, _MAX_PREFILL_TOKENS, None, 0)
        for request in self.waiting:
            if len(adder.can_run_list) + len(self.running.reqs) >= self.max_running:
                break
            request.init_next_round_input(self.tree)
            verdict = self.admission.around_add_one_req(self._add, adder, request, False, None)
            if verdict is not AddReqResult.CONTINUE:
                self.full = verdict is AddReqResult.NO_TOKEN
                break
        admitted = list(adder.can_run_list)
        for request in admitted:
            self._start(request)
        chosen = set(admitted)
        self.waiting = [request for request in self.waiting if request not in chosen]
        return admitted

    def _start(self, request: Req) -> None:
        start, end = GENERATION.extended(request)
        self.rows.alloc([request])
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        row[:start] = GENERATION.cached(self.tree, request).to(torch.int32)
        row[start:end] = self._slots(end - start)
        self._set_length(request, end)
        self.result.computed_tokens += end - start

    def _prefill_done(self, requests: list[Req]) -> None:
        for request in requests:
            request.output_ids.append(1)
            if len(request.output_ids) >= self.outputs[request.rid]:
                self._finish(request)
            else:
                GENERATION.keep(self.tree, request)
        self._filter()

    def _decode(self) -> None:
        started = [request for request in self.running.reqs if len(request.output_ids)]
        while started and not self._make_room(len(started)):
            if len(started) == 1:
                raise ReplayError("one request alone does not fit the pool")
            started.sort(key=lambda request: (-len(request.output_ids), len(request.origin_input_ids)))
            self._retract(started.pop())
        if not started:
            return
        slots = self._slots(len(started)).tolist()
        self.result.most_running = max(self.result.most_running, len(started))
        for request, slot in zip(started, slots, strict=True):
            position = self.lengths[request.rid]
            self.rows.req_to_token[request.kv.req_pool_idx, position] = slot
            self._set_length(request, position + 1)
            request.output_ids.append(1)
            if len(request.output_ids) >= self.outputs[request.rid]:
                self._finish(request)
        self.ratio = max(_RATIO_END, self.ratio - (_RATIO_START - _RATIO_END) / _RATIO_STEPS)
        self._filter()

    def _retract(self, request: Req) -> None:
        GENERATION.release(self.tree, self.rows, request, insert=False)
        request.reset_for_retract()
        self.running.reqs.remove(request)
        self.waiting.append(request)
        self.full = False
        self.result.retractions += 1

    def _finish(self, request: Req) -> None:
        request.finished_reason = FINISH_LENGTH(length=len(request.output_ids))
        GENERATION.release(self.tree, self.rows, request, insert=True)
        self.result.finished += 1

    def _filter(self) -> None:
        before = len(self.running.reqs)
        self.running.reqs = [request for request in self.running.reqs if not request.finished()]
        if len(self.running.reqs) < before:
            self.full = False

    def _set_length(self, request: Req, length: int) -> None:
        self.lengths[request.rid] = length
        request.kv.kv_allocated_len = request.kv.kv_committed_len = length

    def _make_room(self, tokens: int) -> bool:
        missing = tokens - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        return self.allocator.available_size() >= tokens

    def _slots(self, tokens: int) -> torch.Tensor:
        if not self._make_room(tokens):
            raise ReplayError(f"admitted a request whose {tokens} tokens do not fit")
        slots = self.allocator.alloc(tokens)
        return slots.to(torch.int32)
