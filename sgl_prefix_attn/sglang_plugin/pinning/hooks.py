"""Pinning's hooks on SGLang's scheduler, each with one guard.

Without pins and retention, and before the first request with hints or a session, every hook returns at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook
from sgl_prefix_attn.sglang_plugin.compat.pinning_targets import (
    CLOSE_SESSION,
    EVICT,
    EVICT_IN_ALLOCATOR,
    FLUSH,
    RELEASE_KV,
    RUN_BATCH,
)
from sgl_prefix_attn.sglang_plugin.compat.targets import INTERNAL_STATE, ON_IDLE
from sgl_prefix_attn.sglang_plugin.pinning import commands
from sgl_prefix_attn.sglang_plugin.pinning.hints import asks_for_anything
from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings, PinningState
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Gatekeeper
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures, Guard


class PinningHooks(Gatekeeper):
    """The bodies of the hooks of one process, and a gatekeeper of admission.

    Attributes:
        state: the managers of the prefix caches that the hooks have seen.
    """

    gate = "pins"
    unhooked = "pins can block admission"
    queue_unhooked = "retention ignores the waiting queue"

    def __init__(self, settings: PinningSettings, failures: Failures | None = None) -> None:
        self.state = PinningState(settings, failures or Failures())
        self._unsent: WeakSet[Any] = WeakSet()  # requests of a prefill server whose KV is computed or being sent
        self._scheduler: Any = None  # known once it has run a batch

    def around_evict(
        self, original: Callable[..., Any], tree_cache: Any, num_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND hook on `evict_from_tree_cache`: sheds pins and evicts before SGLang does."""
        self._before_allocation(tree_cache, num_tokens)
        return original(tree_cache, num_tokens, *args, **kwargs)

    def around_evict_in_allocator(
        self, original: Callable[..., Any], allocator: Any, tree_cache: Any, num_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND hook on the allocator's `evict_to_free_tokens`, which decode steps call from SGLang 0.5.21 on."""
        self._before_allocation(tree_cache, num_tokens)
        return original(allocator, tree_cache, num_tokens, *args, **kwargs)

    def _before_allocation(self, tree_cache: Any, num_tokens: int) -> None:
        manager = self.state.manager_of(tree_cache)
        if manager is not None and (manager.retention or manager.pins):
            manager.before_allocation(num_tokens)

    def refused(self, adder: Any, request: Any, result: Any, try_again: Callable[[], Any]) -> Any | None:
        """Keeps pins from blocking a request.

        If no request runs and none was admitted, no tokens will be freed. Up to SGLang 0.5.20 a refused request is then
        never tried again. So pins are shed and the request is tried again. While requests run, pins stay: SGLang tries
        again when one ends. A prefill server of disaggregated serving always tries again, and its requests hold their
        KV until it is sent: pins stay until then.

        A microbatch of a pipeline that runs nothing would not be tried again either, although others run and will free
        tokens. It is told of another reason than tokens, which SGLang takes for one of this turn.
        """
        manager = self.state.manager_of(adder.tree_cache)
        if manager is None:
            return None
        with Guard(manager.counters, "pins.add_one_req"):
            if result.name == "NO_TOKEN" and manager.pins and self._idle(adder):
                if self._others_run(adder):
                    return type(result).OTHER
                wanted = min(_most_tokens(request) + 2 * adder.page_size, adder.token_to_kv_pool_allocator.size)
                manager.make_room_for(request, wanted)
                result = try_again()
                if result.name == "NO_TOKEN" and not adder.can_run_list:  # the cached prefix may not be used
                    manager.make_room(wanted)
                    result = try_again()
        return result

    def admitted(self, adder: Any, request: Any) -> None:
        """Records an admission."""
        if asks_for_anything(request):
            self.state.hinted()
        manager = self.state.manager_of(adder.tree_cache)
        if manager is None:
            return
        with Guard(manager.counters, "pins.add_one_req"):
            if self.state.sends_kv:
                self._unsent.add(request)
            manager.admitted(request, _cached_tokens(request))

    def _idle(self, adder: Any) -> bool:
        """Whether no request of this batch will free tokens."""
        running = adder.running_batch
        if adder.can_run_list or (running is not None and running.reqs):
            return False
        return all(request.finished() for request in self._unsent)

    def _others_run(self, adder: Any) -> bool:
        """Whether another microbatch of a pipeline has requests."""
        scheduler = self._scheduler
        if scheduler is None or scheduler.tree_cache is not adder.tree_cache:
            return False
        batches = (*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ()))
        return any(batch is not None and batch.reqs for batch in batches)

    def queue_ordered(self, policy: Any, waiting: list[Any]) -> None:
        """Tells retention the waiting queue in its final order."""
        manager = self.state.manager_of(policy.tree_cache)
        if manager is None or manager.retention is None:
            return
        with Guard(manager.counters, "pins.calc_priority"):
            manager.on_queue(waiting)

    def after_release_kv(self, result: Any, req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `release_kv_cache`: the request finished, was aborted or retracted."""
        if self._unsent:
            self._unsent.discard(req)
        manager = self.state.manager_of(tree_cache)
        if manager is None or not (manager.retention or manager.pins):
            return
        with Guard(manager.counters, "pins.release_kv"):
            manager.on_request_released(req)

    def after_run_batch(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `Scheduler.run_batch`: a scheduler step ended."""
        state, manager = self.state, self.state.manager_of(scheduler.tree_cache)
        if manager is None:
            return
        self._scheduler = scheduler
        with Guard(manager.counters, "pins.run_batch"):
            manager.step()
            state.step_done(scheduler, manager)

    def after_on_idle(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `Scheduler.on_idle`: updates the metrics."""
        manager = self.state.manager_of(scheduler.tree_cache)
        if manager is None:
            return
        with Guard(manager.counters, "pins.on_idle"):
            self.state.idle(scheduler, manager)

    def after_close_session(self, result: Any, scheduler: Any, recv_req: Any) -> None:
        """AFTER hook on `Scheduler.close_session`."""
        manager = self.state.manager_of(scheduler.tree_cache)
        if manager is not None:
            with Guard(manager.counters, "pins.close_session"):
                manager.close_session(recv_req.session_id)

    def after_flush_cache(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `Scheduler.flush_cache`: a flush that was done has dropped all locks."""
        manager = self.state.manager_of(scheduler.tree_cache)
        if manager is None or not result:
            return
        with Guard(manager.counters, "pins.flush_cache"):
            manager.flushed()
            self._pins_changed(scheduler, manager)

    def around_get_internal_state(self, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        """AROUND hook on `Scheduler.get_internal_state`: carries out pinning commands, adds counters to the state."""
        request_id = getattr(recv_req, "rid", None)
        state, manager = self.state, self.state.manager_of(scheduler.tree_cache)
        if not commands.is_command(request_id):
            result = original(scheduler, recv_req)
            if manager is not None:
                with Guard(manager.counters, "pins.get_internal_state"):
                    result.internal_state["prefixpack_pinning"] = manager.counters.as_dict()
                    state.flush_metrics(scheduler, manager)
            elif state.failures.disabled:
                result.internal_state["prefixpack_pinning"] = {"disabled": dict(state.failures.disabled)}
            return result
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        try:
            answer = commands.answer(request_id, manager)
            if manager is not None:
                self._pins_changed(scheduler, manager)
        except Exception as error:  # the one guard of this hook: the caller gets an answer
            recorder = self.state.failures if manager is None else manager.counters
            recorder.failed("pins.command", error, "the command is answered with an error")
            answer = {"error": {"kind": "failed", "message": f"{type(error).__name__}: {error}"}}
        # Answers arrive in any order; the rank tells which copy refused.
        rank = _data_parallel_rank(scheduler)
        if rank is not None:
            answer[commands.COPY_KEY] = rank
        return GetInternalStateReqOutput(internal_state={commands.ANSWER_KEY: answer})

    def _pins_changed(self, scheduler: Any, manager: PinningManager) -> None:
        """Updates the metrics at once. Whatever they do, the command was carried out."""
        with Guard(manager.counters, "pins.metrics"):
            self.state.flush_metrics(scheduler, manager)

    def table(self) -> tuple[Hook, ...]:
        """The hooks for the installed SGLang, without those of `Admission`."""
        hooks = (
            Hook(EVICT, self.around_evict, "AROUND", "pins can make an allocation fail"),
            Hook(RELEASE_KV, self.after_release_kv, "AFTER", "retention does not learn what is cached"),
            Hook(RUN_BATCH, self.after_run_batch, "AFTER", "pins do not expire"),
            Hook(ON_IDLE, self.after_on_idle, "AFTER", "metrics of pins lag by some steps while the server is idle"),
            Hook(FLUSH, self.after_flush_cache, "AFTER", "pins outlive a flush of the cache"),
            Hook(
                CLOSE_SESSION, self.after_close_session, "AFTER", "KV of closed sessions stays until it is the oldest"
            ),
            Hook(INTERNAL_STATE, self.around_get_internal_state, "AROUND", "pinning commands get no answer"),
        )
        if not _allocator_evicts():
            return hooks
        return (
            *hooks,
            Hook(
                EVICT_IN_ALLOCATOR,
                self.around_evict_in_allocator,
                "AROUND",
                "pins can make decode steps retract requests",
            ),
        )


def _allocator_evicts() -> bool:
    """Whether decode steps evict through the allocator (SGLang 0.5.19 and later)."""
    try:
        from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    except ImportError:
        return False
    return hasattr(BaseTokenToKVPoolAllocator, "evict_to_free_tokens")


def _data_parallel_rank(scheduler: Any) -> int | None:
    """Data-parallel rank of a scheduler; None if there is only one copy of the model, or it is unknown."""
    from sglang.srt.runtime_context import get_parallel

    # Schedulers of 0.5.23 have no `ps`.
    ranks = getattr(scheduler, "ps", None) or get_parallel()
    try:
        return getattr(ranks, "dp_rank", None)
    except (RuntimeError, ValueError):  # 0.5.23's context in a process without ranks
        return None


def _most_tokens(req: Any) -> int:
    """Tokens that SGLang asks for: one more than the prompt and the capped new tokens."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    new = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
    return len(req.origin_input_ids) + len(req.output_ids) + new + 1


def _cached_tokens(req: Any) -> int:
    indices = getattr(req, "prefix_indices", None)
    return int(req.prefix_len) if indices is None else len(indices)
