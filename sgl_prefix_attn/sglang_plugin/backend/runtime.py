"""The parts of the plug-in that a scheduler process has once, whatever number of backends SGLang builds in it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from sgl_prefix_attn.core.planner import Planner
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch.graph_variants import GraphRoutes
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRoutes
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker
from sgl_prefix_attn.sglang_plugin.prefix.handover import HOOKS, Handed, Handover, Kind
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.metrics import MetricsExporter

logger = logging.getLogger(__name__)


@dataclass
class Runtime:
    """Shared by the backends of one process.

    Attributes:
        planner: of the last packed step; None before the first.
        last_packed: what the last packed step was handed.
        routes, graph_routes: of the backend whose steps may run packed.
        metrics_failures: updates of the Prometheus metrics that raised; the steps went on.
    """

    settings: Settings
    sglang_version: str
    counters: Counters
    handover: Handover
    exporter: MetricsExporter | None = None
    stock_backend: str = ""
    planner: Planner | None = None
    last_packed: Handed | None = None
    routes: StepRoutes | None = None
    graph_routes: GraphRoutes | None = None
    metrics_failures: int = 0
    _steps: int = field(default=0, repr=False)

    def step_done(self) -> None:
        """Called once a step, packed or not: updates the metrics every `metrics_flush_steps` steps. Never raises."""
        if self.exporter is None:
            return
        self._steps += 1
        if self._steps >= self.settings.metrics_flush_steps:
            self.flush_metrics()

    def flush_metrics(self) -> None:
        """Brings the metrics up to date. Never raises: what fails is counted, and logged the first time."""
        self._steps = 0
        if self.exporter is None:
            return
        try:
            self.exporter.update(self.counters)
        except Exception:  # the one guard of the metrics: their files can be full or gone, and serving goes on
            if not self.metrics_failures:
                logger.exception("prefixpack: updating the Prometheus metrics failed; they may be wrong from now on")
            self.metrics_failures += 1


_active: Runtime | None = None


def active() -> Runtime | None:
    """The runtime of this process, None while no backend was built."""
    return _active


def start(settings: Settings, sglang_version: str, kind: Kind, runner: Any) -> Runtime:
    """The runtime of this process, made on the first call."""
    global _active
    if _active is None:
        counters = Counters()
        exporter = MetricsExporter.for_runner(runner) if settings.metrics else None
        _active = Runtime(settings, sglang_version, counters, Handover(kind, BatchTracker(), counters), exporter)
        HOOKS.active = _active.handover
    return _active


def stop() -> None:
    """Forgets the runtime, so that the hooks of this process do nothing (tests)."""
    global _active
    _active = None
    HOOKS.active = None
