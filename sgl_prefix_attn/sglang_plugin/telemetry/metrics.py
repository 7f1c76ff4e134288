"""Prometheus metrics next to SGLang's own on GET /metrics.

SGLang uses prometheus_client's multiprocess mode: a metric made in a scheduler process appears on the server's
/metrics by itself, provided prometheus_client is imported after SGLang set PROMETHEUS_MULTIPROC_DIR; hence the late
import. All names start with `sglang:prefixpack_`; labels as SGLang's scheduler metrics have them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

PREFIX = "sglang:prefixpack_"

# name -> (help text, attribute or property of Counters)
COUNTERS = {
    "plans_made_total": ("Plans made by the planner.", "plans_made"),
    "plans_reused_total": ("Steps that reused the plan of the step before.", "plans_reused"),
    "plan_seconds_total": ("Seconds spent in making plans.", "plan_seconds"),
    "host_seconds_total": ("Seconds of host work of ours before forwards: paths, forest, plan.", "host_seconds"),
    "kv_tokens_read_total": ("KV tokens read by packed steps, per layer and KV head.", "kv_tokens_read"),
    "kv_tokens_saved_total": ("KV tokens that request-wise attention would have read besides.", "kv_tokens_saved"),
}
PACKED_STEPS = ("packed_steps_total", "Steps that ran packed, by mode.")
ROUTED_STEPS = ("routed_steps_total", "Decode steps that had a choice, by route: packed or stock.")
FALLBACKS = ("fallbacks_total", "Steps, or layers of packed steps, that the stock backend ran, by reason.")
READ_RATIO = (
    "kv_read_ratio",
    "KV tokens read by packed steps divided by what request-wise attention reads, since the last update.",
)


@dataclass
class MetricsExporter:
    """Copies `Counters` into Prometheus metrics when told to.

    Args:
        labels: label values of every metric of this process.
        registry: where to register; None: prometheus_client's default, as SGLang does.
    """

    labels: dict[str, str]
    registry: Any = None
    _metrics: dict[str, Any] = field(default_factory=dict, repr=False)
    _exported: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)

    @classmethod
    def for_runner(cls, runner: Any) -> MetricsExporter | None:
        """The exporter of a model runner's process; None if the server exports no metrics or not from this rank."""
        arguments = runner.server_args
        if not getattr(arguments, "enable_metrics", False):
            return None
        ranks = _ranks(runner)
        tp_rank = int(getattr(ranks, "tp_rank", 0) or 0)
        if tp_rank != 0 and not getattr(arguments, "enable_metrics_for_all_schedulers", False):
            return None
        labels = {
            "model_name": str(getattr(arguments, "served_model_name", None) or arguments.model_path),
            "tp_rank": str(tp_rank),
            "pp_rank": str(int(getattr(ranks, "pp_rank", 0) or 0)),
        }
        dp_rank = getattr(ranks, "dp_rank", None)
        if dp_rank is not None:
            labels["dp_rank"] = str(dp_rank)
        return cls(labels)

    def update(self, counters: Counters) -> None:
        """Brings the metrics up to date; costs some microseconds, so not for every step."""
        if not self._metrics:
            self._create()
        read = self._growth("kv", "read", counters.kv_tokens_read)
        per_request = self._growth("kv", "per_request", counters.kv_tokens_per_request)
        if per_request > 0:
            self._metrics[READ_RATIO[0]].labels(**self.labels).set(read / per_request)
        for name, (_, attribute) in COUNTERS.items():
            self._increase(name, "", getattr(counters, attribute))
        for mode, steps in counters.steps_packed.items():
            self._increase(PACKED_STEPS[0], mode, steps, mode=mode)
        for route, steps in counters.routed_steps.items():
            self._increase(ROUTED_STEPS[0], route, steps, route=route)
        for reason, times in counters.fallbacks.items():
            self._increase(FALLBACKS[0], reason, times, reason=reason)

    def _create(self) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if self.registry is None else self.registry
        names = list(self.labels)
        for name, (text, _) in COUNTERS.items():
            self._metrics[name] = Counter(PREFIX + name, text, names, registry=registry)
        for (name, text), label in ((PACKED_STEPS, "mode"), (ROUTED_STEPS, "route"), (FALLBACKS, "reason")):
            self._metrics[name] = Counter(PREFIX + name, text, [*names, label], registry=registry)
        self._metrics[READ_RATIO[0]] = Gauge(
            PREFIX + READ_RATIO[0], READ_RATIO[1], names, registry=registry, multiprocess_mode="mostrecent"
        )

    def _increase(self, name: str, key: str, total: float, **labels: str) -> None:
        growth = self._growth(name, key, total)
        if growth > 0:
            self._metrics[name].labels(**self.labels, **labels).inc(growth)

    def _growth(self, name: str, key: str, total: float) -> float:
        growth = total - self._exported.get((name, key), 0.0)
        self._exported[(name, key)] = total
        return growth


def _ranks(runner: Any) -> Any:
    """What knows this process's ranks: the runner up to 0.5.14, then its `ps`, from 0.5.21 on SGLang's context."""
    for holder in (getattr(runner, "ps", None), runner):
        if hasattr(holder, "tp_rank"):
            return holder
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
