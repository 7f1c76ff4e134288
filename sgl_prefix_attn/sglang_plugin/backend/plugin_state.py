"""The state of the plug-in in one SGLang process, with one record for each backend."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import StepPlanner
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import LayerRegistry
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, Mode
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed, Handover, HandoverHooks
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason
from sgl_prefix_attn.sglang_plugin.telemetry.metrics import MetricsExporter

logger = logging.getLogger(__name__)

_Owned = TypeVar("_Owned")


@dataclass(eq=False)
class BackendRecord:
    """What the process keeps about one backend.

    Attributes:
        step_planner: decides the backend's steps.
        router: packed or stock, for steps that can run either way.
        executor: runs packed steps, and owns the planners of the attention shapes.
        layers: the model's attention layers.
        wraps: the stock backend's name in wrap mode, None under the name `prefixpack`.
        last_packed: paths of its last packed step; None before the first.
    """

    step_planner: StepPlanner
    router: StepRouter
    executor: Executor
    layers: LayerRegistry
    wraps: str | None = None
    last_packed: Handed | None = None


@dataclass
class PluginState:
    """State of one process, shared by all its backends.

    Attributes:
        settings: settings in force.
        sglang_version: of the installed SGLang.
        counters: totals of all backends.
        handover: None until the first backend is built; until then no hook does anything.
        exporter: Prometheus metrics; None if this process exports none.
        stock_backend: name of the stock backend of the target model.
        backends: the record of each backend that may pack, in the order of their creation, for as long as it lives.
        refused: why the others pack nothing, of each that lives.
        handover_hooks: bodies of the hooks that serve `handover`.
    """

    settings: Settings
    sglang_version: str
    counters: Counters = field(default_factory=Counters)
    handover: Handover | None = None
    exporter: MetricsExporter | None = None
    stock_backend: str = ""
    backends: weakref.WeakKeyDictionary[Any, BackendRecord] = field(default_factory=weakref.WeakKeyDictionary)
    refused: weakref.WeakKeyDictionary[Any, Reason] = field(default_factory=weakref.WeakKeyDictionary)
    handover_hooks: HandoverHooks = field(default_factory=HandoverHooks)
    _owned: dict[type, Any] = field(default_factory=dict, repr=False)
    _records: list[weakref.ref[BackendRecord]] = field(default_factory=list, repr=False)
    _steps: int = field(default=0, repr=False)
    _looked_for_metrics: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self._owned[Failures] = self.counters.failures

    def serve(self, facts: ServerFacts) -> Handover:
        """Starts the handover of paths and the metrics; called for each backend, works once."""
        if self.handover is None:
            self.export_metrics(lambda: facts)
            self.handover = Handover(BatchTracker(facts.microbatches), self.counters)
            self.handover_hooks.active = self.handover
        return self.handover

    def export_metrics(self, read_facts: Callable[[], ServerFacts]) -> None:
        """Makes the exporter of a server that has metrics; works once, and reads the facts once."""
        if self.settings.metrics and not self._looked_for_metrics:
            self._looked_for_metrics = True
            facts = read_facts()
            self.exporter = MetricsExporter.of_server(facts.server_args, facts.ranks)

    def add(self, backend: Any, record: BackendRecord) -> None:
        """Adds the record of a backend that may pack. Paths are read from now on if any backend may pack them."""
        self.backends[backend] = record
        self._records = [weakref.ref(known) for known in self.backends.values()]
        if self.handover is not None:
            self.handover.read_packable_only(self.why_stock)
            if record.step_planner.why_all_stock is None:
                self.handover_hooks.active = self.handover

    def refuse(self, backend: Any, reason: Reason) -> None:
        """Notes why a backend packs nothing."""
        self.refused[backend] = reason
        if self.handover is not None:
            self.handover.read_packable_only(self.why_stock)

    def why_stock(self, mode: Mode) -> Reason | None:
        """The reason why no backend packs steps of a kind, None if one may."""
        never = None
        for living in self._records:  # each change of the batch asks; walking a weak dictionary takes longer
            record = living()
            reason = fallback_reasons.DRAFT_WORKER if record is None else record.step_planner.why_stock(mode)
            if reason is None:
                return None
            if reason != fallback_reasons.DRAFT_WORKER:  # their steps are not read
                never = never or reason
        return never or next(iter(self.refused.values()), None)

    def refusal(self) -> Reason | None:
        """The reason why no backend packs a step any more, None if one may or if there is no backend."""
        reasons = [record.step_planner.why_all_stock for record in self.backends.values()] + [*self.refused.values()]
        if not reasons or None in reasons:
            return None
        return next((reason for reason in reasons if reason != fallback_reasons.DRAFT_WORKER), reasons[0])

    def disabled(self) -> dict[str, str]:
        """Why features of this process are off, by the name of their settings; `packing` for all packed steps."""
        refusal = self.refusal()
        return self.counters.failures.disabled | ({} if refusal is None else {"packing": refusal.key})

    def stop_if_nothing_packs(self) -> None:
        """Ends our work in the steps of this process if no backend packs any: hooks and backends do next to nothing.

        Called when a backend has found that none of its layers runs packed. One-token steps stay what they are: all
        ranks have to make them, and the others may not have found the same.
        """
        reason = self.refusal()
        if reason is None or self.handover is None or self.counters.stopped:  # captured graphs may hold packed layers
            return
        logger.warning("prefixpack: all steps run on the stock backend from now on: %s", reason.text)
        if not self.handover.runs_one_token_steps:
            self.handover_hooks.active = None
        for backend, record in self.backends.items():
            backend.pass_through(record.step_planner.why_all_stock)

    def wrapped(self) -> list[str]:
        """Names of the stock backends that run wrapped."""
        return sorted({record.wraps for record in self.backends.values() if record.wraps is not None})

    def routing_policies(self) -> list[str]:
        """Names of the policies by which backends that may pack route their decode steps."""
        records = [record for record in self.backends.values() if record.step_planner.why_all_stock is None]
        return sorted({record.router.policy_in_use for record in records})

    def reported(self) -> BackendRecord | None:
        """The record that `GET /server_info` shows: the newest that packed a step, else the newest that may pack."""
        records = [record for record in self.backends.values() if record.step_planner.why_all_stock is None]
        packed = [record for record in records if record.last_packed is not None]
        return next(reversed(packed or records), None)

    def own(self, kind: type[_Owned], *arguments: Any) -> _Owned:
        """The one object of a type in this process, made with `arguments` by the first call.

        For state of packages that must not import this one (compat, pinning, scheduling): their hooks are
        bound methods of the object, and `hook_table` puts them into its tables.
        """
        found = self._owned.get(kind)
        if found is None:
            found = self._owned[kind] = kind(*arguments)
        return found

    def step_done(self) -> None:
        """Called once a step: updates the metrics every `metrics_flush_steps` steps. Never raises."""
        if self.exporter is None:
            return
        self._steps += 1
        if self._steps >= self.settings.metrics_flush_steps:
            self.flush_metrics()

    def flush_metrics(self) -> None:
        """Updates the metrics. Never raises: their files can be full or gone, and serving goes on."""
        self._steps = 0
        if self.exporter is None:
            return
        with self.counters.failures.guard("metrics", "they may be wrong from now on"):
            self.exporter.update(self.counters, self.wrapped(), self.routing_policies(), self.disabled())


_state: PluginState | None = None


def active() -> PluginState | None:
    """The state of this process; None while nothing of the plug-in runs here."""
    return _state


def of_process(settings: Settings, sglang_version: str) -> PluginState:
    """The state of this process, made by the first call with its settings."""
    global _state
    if _state is None:
        _state = PluginState(settings, sglang_version)
    return _state


def deactivate_hooks() -> None:
    """Lets the hooks on steps do nothing from now on, unless a backend of ours lives in this process."""
    if _state is not None and not (_state.backends or _state.refused):
        _state.handover = _state.handover_hooks.active = None


def reset() -> None:
    """Drops the state, so that the hooks of this process do nothing (tests)."""
    global _state
    if _state is not None:
        _state.handover_hooks.active = None
    _state = None
