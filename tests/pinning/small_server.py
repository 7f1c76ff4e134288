"""SGLang's real requests, prefill adder, pools and prefix caches, driven as its scheduler drives them, without a model.

What the scheduler's loop does is written out here in short (support/caches.py has what differs between releases):
admission in queue order that stops at the first refusal, the flag `batch_is_full` that a refusal for lack of tokens
sets and only a running batch clears, eviction before each allocation, retraction when decode finds no room. Our hooks
sit where they sit in the server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache import common

from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER, Place
from sgl_prefix_attn.sglang_plugin.pinning.hints import OURS, Hints
from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningHooks
from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures
from tests.support.caches import GENERATION, Pools


def prompt(name: int, length: int = 20) -> list[int]:
    return [1000 * name + position for position in range(length)]


class NoHooks(PinningHooks):
    """SGLang without our hooks: they see no manager."""

    def __init__(self) -> None:
        super().__init__(PinningSettings())
        self.state.manager_of = lambda cache: None  # type: ignore[method-assign]


class SmallServer(Pools):
    """Args:
    settings: None: SGLang without our hooks.
    options: `page` and `eagle` of `Pools`. With pages, requests have one new token.
    """

    def __init__(
        self, kind: str, *, slots: int, rows: int = 8, settings: PinningSettings | None, **options: Any
    ) -> None:
        super().__init__(kind, slots=slots, rows=rows, context=512, **options)
        self.kind, self.slots = kind, slots
        # As Scheduler, for the hooks that take one.
        self.tree_cache = self.cache
        runner = SimpleNamespace(device="cpu", dtype=None, server_args=SimpleNamespace())
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.waiting: list[Req] = []
        self.running = SimpleNamespace(reqs=[], batch_is_full=False)
        self.finished: list[Req] = []
        self.aborted: list[Req] = []
        self.retractions = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.hooks = NoHooks() if settings is None else PinningHooks(settings)
        self.admission = Admission(Failures())
        self.admission.enlist(self.hooks)

    @property
    def manager(self) -> PinningManager:
        return self.hooks.state.manager_of(self.cache)

    # What users do ----------------------------------------------------------------------------------------------------

    def fits(self, prompt: list[int], new_tokens: int) -> bool:
        """Whether the server accepts such a request; SGLang refuses what an empty pool could not hold."""
        return len(prompt) + new_tokens + 2 < self.slots

    def send(self, prompt: list[int], new_tokens: int, extra_key: str | None = None) -> Req:
        request = self.request(prompt, extra_key, new_tokens)
        self.waiting.append(request)
        return request

    def abort(self, request: Req) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            self.aborted.append(request)
        elif request in self.running.reqs:
            request.to_finish = FINISH_ABORT("by the user")

    def flush(self) -> bool:
        done = not self.waiting and not self.running.reqs
        if done:
            self.clear()
        self.hooks.after_flush_cache(done, self)
        return done

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step of the scheduler; whether anything was run."""
        ran = self._prefill() or self._decode()
        if ran:
            self.hooks.after_run_batch(None, self)
        return ran

    def run(self) -> None:
        """Steps until nothing is left to run."""
        while self.waiting or self.running.reqs:
            assert self.step()
            self.check_accounting()

    def serve(
        self,
        prompt: list[int],
        extra_key: str | None = None,
        place: Place | None = None,
        *,
        session: str | None = None,
        hints: Hints | None = None,
        new_tokens: int = 1,
    ) -> int:
        """Runs one request, which may have a place in an offline job; returns how much of its prompt was cached."""
        before = self.cached_tokens
        request = self.send(prompt, new_tokens, extra_key)
        request.session_id = session
        if hints is not None:
            action = SimpleNamespace(action_type=OURS, payload=hints.model_dump(mode="json"))
            request.kv_hints = SimpleNamespace(actions=[action])
        if place is not None:
            request.sampling_params.custom_params = {CUSTOM_PARAMETER: place.encode()}
        self.run()
        return self.cached_tokens - before

    def _prefill(self) -> bool:
        running = self.running
        if running.batch_is_full or not self.waiting:
            return False
        if self.pool.available_size() <= 0:
            running.batch_is_full = True
            return False
        self.admission.after_calc_priority(None, self, self.waiting)
        # A low ratio: more is admitted than fits to its end, so that decode has to retract.
        adder = PrefillAdder(self.page, self.cache, self.allocator, running, 0.1, 4096, None)
        for request in self.waiting:
            if len(adder.can_run_list) >= self.pool.available_size():
                running.batch_is_full = True
                break
            request.init_next_round_input(self.cache)
            result = self.admission.around_add_one_req(
                PrefillAdder.add_one_req, adder, request, has_chunked_req=False, truncation_align_size=None
            )
            if result != AddReqResult.CONTINUE:
                running.batch_is_full = running.batch_is_full or result == AddReqResult.NO_TOKEN
                break
        if not adder.can_run_list:
            return False
        self.waiting = [request for request in self.waiting if request not in adder.can_run_list]
        for request in adder.can_run_list:
            self._compute(request)
        running.reqs += adder.can_run_list
        return True

    def _compute(self, request: Req) -> None:
        found = GENERATION.cached(self.cache, request)
        cached, total = len(found), len(request.full_untruncated_fill_ids)
        self.prompt_tokens += total
        self.cached_tokens += cached
        slots = self._alloc(self._pages(total - cached))
        assert slots is not None, "an admitted request got no KV"
        self.pool.alloc([request])
        row = self.pool.req_to_token[request.kv.req_pool_idx]
        row[:cached] = found.to(torch.int32)
        row[cached:total] = slots[: total - cached].to(torch.int32)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = total
        request.output_ids.append(1_000_000 + self._count * 1000 + len(request.output_ids))
        GENERATION.keep(self.cache, request)

    def _decode(self) -> bool:
        running = self.running
        before = len(running.reqs)
        for request in list(running.reqs):
            if request.to_finish is not None or len(request.output_ids) >= request.sampling_params.max_new_tokens:
                aborted = request.to_finish is not None
                request.finished_reason = request.to_finish or FINISH_LENGTH(length=len(request.output_ids))
                running.reqs.remove(request)
                self._release(request, insert=True)
                (self.aborted if aborted else self.finished).append(request)
        if not running.reqs:
            running.batch_is_full = False
            return before > 0
        while not self._has_room(len(running.reqs)):
            request = running.reqs.pop()
            self._release(request, insert=False)
            if running.reqs:
                self.retractions += 1
                request.reset_for_retract()
                self.waiting.append(request)
            else:
                self.aborted.append(request)
                break
        if len(running.reqs) < before:
            running.batch_is_full = False
        for request in running.reqs:
            (slot,) = self.allocator.alloc(1)
            position = request.kv.kv_allocated_len
            self.pool.req_to_token[request.kv.req_pool_idx, position] = slot
            request.kv.kv_allocated_len = request.kv.kv_committed_len = position + 1
            request.output_ids.append(1_000_000 + self._count * 1000 + len(request.output_ids))
        return True

    # Truth ------------------------------------------------------------------------------------------------------------

    def check_accounting(self) -> None:
        """SGLang's leak check: every slot is free, in the tree, or a running request's own."""
        running = [request.kv for request in self.running.reqs]
        own = sum(self._pages(kv.kv_allocated_len) - kv.cache_protected_len for kv in running)
        total = self.allocator.available_size() + self.cache.evictable_size() + self.cache.protected_size() + own
        assert total == self.slots, f"{self.slots - total} slots leaked"

    # Details ----------------------------------------------------------------------------------------------------------

    def _pages(self, tokens: int) -> int:
        """Tokens of the pages that so many tokens need."""
        return -(-tokens // self.page) * self.page

    def _has_room(self, tokens: int) -> bool:
        self._evict(tokens)
        return self.allocator.available_size() >= tokens

    def _alloc(self, tokens: int) -> Any:
        self._evict(tokens)
        return self.allocator.alloc(tokens)

    def _evict(self, tokens: int) -> None:
        self.hooks.around_evict(common.evict_from_tree_cache, self.cache, tokens)

    def _release(self, request: Req, *, insert: bool) -> None:
        GENERATION.release(self.cache, self.pool, request, insert=insert)
        self.hooks.after_release_kv(None, request, self.cache)
