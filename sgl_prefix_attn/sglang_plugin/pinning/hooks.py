"""Where pinning takes part in SGLang's scheduler: hooks, each with one guard, and the keeper of this process's cache.

The keeper is made when a hook first sees the cache. Without pins, and with retention off, every hook returns at once
and SGLang runs as it would without us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook
from sgl_prefix_attn.sglang_plugin.compat.pinning_targets import EVICT, FLUSH, RELEASE_KV, RUN_BATCH
from sgl_prefix_attn.sglang_plugin.compat.targets import ADD_ONE_REQ, CALC_PRIORITY, INTERNAL_STATE
from sgl_prefix_attn.sglang_plugin.pinning import commands
from sgl_prefix_attn.sglang_plugin.pinning.manager import CacheKeeper
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningMetrics
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import lockable_tree
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import Unreadable
from sgl_prefix_attn.sglang_plugin.telemetry.metrics import MetricsExporter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PinningSettings:
    """What of the settings concerns pinning.

    Attributes:
        budget_percent: share of the KV pool that may be pinned; 0: no pins.
        retention: whether retention chooses what is evicted.
        lookahead: waiting requests that retention looks at.
        block: tokens per unit of what retention remembers.
        flush_steps: scheduler steps between two updates of the metrics.
    """

    budget_percent: int = 0
    retention: bool = False
    lookahead: int = 1024
    block: int = 64
    flush_steps: int = 32

    @classmethod
    def of(cls, settings: Settings) -> PinningSettings:
        return cls(
            budget_percent=settings.pin_budget_percent,
            retention=settings.retention == "reuse",
            lookahead=settings.retention_lookahead,
            block=settings.retention_block,
            flush_steps=settings.metrics_flush_steps,
        )

    @property
    def wanted(self) -> bool:
        """Whether pins or retention are asked for."""
        return self.budget_percent > 0 or self.retention


class _Process:
    """The keepers of this scheduler process: one for each prefix cache that a hook has seen, as a rule one."""

    def __init__(self, settings: PinningSettings) -> None:
        self.settings = settings
        self.metrics: PinningMetrics | None = None
        # By the cache's id, which stays its own because the cache is held.
        self._keepers: dict[int, tuple[Any, CacheKeeper | None]] = {}
        self._steps = 0

    def keeper(self, cache: Any) -> CacheKeeper | None:
        """The keeper of this cache, None if it cannot be pinned."""
        known = self._keepers.get(id(cache))
        if known is None:
            known = self._keepers[id(cache)] = (cache, self._make(cache))
        return known[1]

    def give_up(self, cache: Any) -> None:
        """No keeper for this cache: making one failed."""
        self._keepers[id(cache)] = (cache, None)

    def step_done(self, scheduler: Any, keeper: CacheKeeper) -> None:
        """Updates the metrics every `flush_steps` steps."""
        self._steps += 1
        if self._steps >= self.settings.flush_steps:
            self._steps = 0
            if self.metrics is None:
                exporter = MetricsExporter.for_runner(scheduler.tp_worker.model_runner)
                self.metrics = None if exporter is None else PinningMetrics(exporter.labels)
            self.flush_metrics(keeper)

    def flush_metrics(self, keeper: CacheKeeper) -> None:
        """Brings the metrics up to date, once the first update has made them."""
        if self.metrics is not None:
            self.metrics.update(keeper.counters)

    def _make(self, cache: Any) -> CacheKeeper | None:
        tree = lockable_tree(cache)
        if isinstance(tree, Unreadable):
            logger.warning("prefixpack cannot pin in this prefix cache: %s", tree.detail)
            return None
        size = cache.token_to_kv_pool_allocator.size
        budget = size * self.settings.budget_percent // 100
        logger.info(
            "prefixpack pins in %s through %s: budget %d of %d tokens, retention %s",
            type(cache).__name__,
            tree.name,
            budget,
            size,
            "on" if self.settings.retention else "off",
        )
        return CacheKeeper(
            tree,
            cache,
            budget=budget,
            retention=self.settings.retention,
            lookahead=self.settings.lookahead,
            block=self.settings.block,
        )


_process: _Process | None = None


def activate(settings: PinningSettings | None) -> None:
    """Lets the hooks of this process work; None: do nothing (the state before the first call)."""
    global _process
    _process = None if settings is None else _Process(settings)


def active() -> bool:
    """Whether the hooks of this process work."""
    return _process is not None


def keeper_of(cache: Any) -> CacheKeeper | None:
    """The keeper of a cache in this process, None if there is none."""
    if _process is None or cache is None:
        return None
    try:
        return _process.keeper(cache)
    except Exception:  # the one guard of making a keeper
        logger.exception("prefixpack cannot pin in this prefix cache")
        _process.give_up(cache)
        return None


def around_evict(original: Callable[..., Any], tree_cache: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `evict_from_tree_cache`: pins give way before an allocation fails, and retention chooses."""
    keeper = keeper_of(tree_cache)
    if keeper is None or not (keeper.retention or keeper.pins):
        return original(tree_cache, num_tokens, *args, **kwargs)
    with keeper.protected(num_tokens):
        return original(tree_cache, num_tokens, *args, **kwargs)


def around_add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `PrefillAdder.add_one_req`: notes who was admitted, and keeps pins from blocking admission.

    If nothing runs and nothing else was admitted, no KV will come free by itself, and up to SGLang 0.5.20 the refused
    request would then never be tried again. So pins are shed and the request is tried again. While something runs,
    pins stay: the request is tried again when it ends.
    """
    keeper = keeper_of(adder.tree_cache)
    if keeper is None:
        return original(adder, req, *args, **kwargs)
    result = original(adder, req, *args, **kwargs)
    try:
        if result.name == "NO_TOKEN" and keeper.pins and not _admitted(adder, req) and _idle(adder):
            # One token more than the request and the cap on new tokens can take.
            wanted = len(req.origin_input_ids) + len(req.output_ids) + _new_tokens(req) + 2 * adder.page_size + 1
            wanted = min(wanted, adder.token_to_kv_pool_allocator.size)
            keeper.make_room_for(req, wanted)
            result = original(adder, req, *args, **kwargs)
            if result.name == "NO_TOKEN" and not _admitted(adder, req):  # it may not use what is cached of it
                keeper.make_room(wanted)
                result = original(adder, req, *args, **kwargs)
        if _admitted(adder, req):
            keeper.admitted(req, _cached_tokens(req))
    except Exception:  # the one guard of this hook
        keeper.counters.failed()
    return result


def after_calc_priority(result: Any, policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `SchedulePolicy.calc_priority`: the waiting queue in its final order; what offline jobs share."""
    keeper = keeper_of(policy.tree_cache)
    if keeper is None or keeper.retention is None:
        return
    try:
        keeper.arrived(waiting_queue)
        keeper.queue(waiting_queue)
    except Exception:  # the one guard of this hook
        keeper.counters.failed()


def after_release_kv(result: Any, req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `release_kv_cache`: the request finished, was aborted or retracted."""
    keeper = keeper_of(tree_cache)
    if keeper is None or not (keeper.retention or keeper.pins):
        return
    try:
        keeper.left_behind(req)
    except Exception:  # the one guard of this hook
        keeper.counters.failed()


def after_run_batch(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `Scheduler.run_batch`: one scheduler step."""
    keeper = keeper_of(scheduler.tree_cache)
    if keeper is None or _process is None:
        return
    try:
        keeper.step()
        _process.step_done(scheduler, keeper)
    except Exception:  # the one guard of this hook
        keeper.counters.failed()


def after_flush_cache(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `Scheduler.flush_cache`: if it was done, the locks went with the tree."""
    keeper = keeper_of(scheduler.tree_cache)
    if keeper is None or not result:
        return
    try:
        keeper.flushed()
    except Exception:  # the one guard of this hook
        keeper.counters.failed()


def around_get_internal_state(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND hook on `Scheduler.get_internal_state`: commands about pins, and our counters in the state."""
    request_id = getattr(recv_req, "rid", None)
    keeper = keeper_of(scheduler.tree_cache)
    if not commands.is_command(request_id):
        result = original(scheduler, recv_req)
        if keeper is not None and _process is not None:
            try:
                result.internal_state["prefixpack_pinning"] = keeper.counters.as_dict()
                _process.flush_metrics(keeper)
            except Exception:  # the one guard of what we add: SGLang's own answer must arrive
                keeper.counters.failed()
        return result
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    try:
        answer = commands.answer(request_id, keeper)
    except Exception as error:  # the one guard of this hook: whoever asked gets an answer
        if keeper is not None:
            keeper.counters.failed()
        answer = {"error": {"kind": "failed", "message": f"{type(error).__name__}: {error}"}}
    # Answers come in any order, and whoever asked wants to know whose a refusal is.
    rank = _copy(scheduler)
    if rank is not None:
        answer[commands.COPY_KEY] = rank
    return GetInternalStateReqOutput(internal_state={commands.ANSWER_KEY: answer})


PINNING_HOOKS: tuple[Hook, ...] = (
    Hook(EVICT, around_evict, "AROUND", "pins can make an allocation fail"),
    Hook(ADD_ONE_REQ, around_add_one_req, "AROUND", "pins can block admission"),
    Hook(CALC_PRIORITY, after_calc_priority, "AFTER", "retention does not see the waiting queue"),
    Hook(RELEASE_KV, after_release_kv, "AFTER", "retention does not see what is cached"),
    Hook(RUN_BATCH, after_run_batch, "AFTER", "pins do not expire"),
    Hook(FLUSH, after_flush_cache, "AFTER", "pins outlive a flush of the cache"),
    Hook(INTERNAL_STATE, around_get_internal_state, "AROUND", "nobody can pin"),
)


def _copy(scheduler: Any) -> int | None:
    """Which data-parallel copy of the model a scheduler serves; None if there is only one, or nothing tells."""
    from sglang.srt.runtime_context import get_parallel

    # Schedulers of 0.5.23 have no ranks of their own.
    ranks = getattr(scheduler, "ps", None) or get_parallel()
    try:
        return getattr(ranks, "dp_rank", None)
    except (RuntimeError, ValueError):  # 0.5.23's context, in a process that never got ranks
        return None


def _admitted(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _idle(adder: Any) -> bool:
    running = adder.running_batch
    return not adder.can_run_list and (running is None or not running.reqs)


def _new_tokens(req: Any) -> int:
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    return min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)


def _cached_tokens(req: Any) -> int:
    indices = getattr(req, "prefix_indices", None)
    return int(req.prefix_len) if indices is None else len(indices)
