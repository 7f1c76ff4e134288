"""Prometheus metrics next to SGLang's own on GET /metrics.

SGLang uses the multiprocess mode of prometheus_client: a metric of a scheduler process appears on the server's
/metrics. prometheus_client must be imported after SGLang has set PROMETHEUS_MULTIPROC_DIR, so the import is late. All
names start with `sglang:prefixpack_`; the labels are those of SGLang's scheduler metrics, `--extra-metric-labels` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

PREFIX = "sglang:prefixpack_"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without PREFIX; a counter's ends with `_total`.
        text: help text.
        kind: counter or gauge.
        label: name of a label beside those of all metrics, or several divided by a space; empty: none.
    """

    name: str
    text: str
    kind: Literal["counter", "gauge"] = "counter"
    label: str = ""


@dataclass
class MetricSet:
    """Exports totals and values as Prometheus metrics; they are created by the first `update`.

    Args:
        metrics: all metrics that updates may name.
        labels: label values of every metric of this process.
        registry: where to register; None: prometheus_client's default, as SGLang does.
    """

    metrics: Sequence[Metric]
    labels: dict[str, str]
    registry: Any = None
    _created: dict[str, Any] = field(default_factory=dict, repr=False)
    _exported: dict[tuple[str, Any], float] = field(default_factory=dict, repr=False)

    def update(self, values: dict[str, float | dict[Any, float]]) -> None:
        """Brings metrics up to date.

        Args:
            values: by metric name the total of a counter or the value of a gauge; for a metric with a label of its
                own, these by label value; by a tuple of values for a metric with several.
        """
        if not self._created:
            self._create()
        for metric in self.metrics:
            value = values.get(metric.name)
            if isinstance(value, dict):
                for label, one in value.items():
                    own = label if isinstance(label, tuple) else (label,)
                    self._set(metric, one, label, **dict(zip(metric.label.split(), own, strict=True)))
            elif value is not None:
                self._set(metric, value, "")

    def _create(self) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if self.registry is None else self.registry
        for metric in self.metrics:
            # A label of --extra-metric-labels gives way to one of ours with its name.
            names = list(dict.fromkeys([*self.labels, *metric.label.split()]))
            if metric.kind == "counter":
                made: Any = Counter(PREFIX + metric.name, metric.text, names, registry=registry)
            else:
                made = Gauge(
                    PREFIX + metric.name, metric.text, names, registry=registry, multiprocess_mode="mostrecent"
                )
            self._created[metric.name] = made

    def _set(self, metric: Metric, value: float, key: Any, **labels: str) -> None:
        if metric.kind == "gauge":
            self._created[metric.name].labels(**{**self.labels, **labels}).set(value)
            return
        before = self._exported.get((metric.name, key))
        if before is None or value > before:
            self._created[metric.name].labels(**{**self.labels, **labels}).inc(value - (before or 0))
            self._exported[(metric.name, key)] = value


# Metrics of one attribute or property of Counters each.
TOTALS = {
    "plans_made": "Plans made by the planner.",
    "plans_reused": "Steps that reused the plan of the step before.",
    "plan_seconds": "Seconds of planning.",
    "host_seconds": "Seconds of host work before forwards: paths, forest, plan.",
    "kv_tokens_read": "KV tokens read by packed steps, per layer and KV head.",
    "shared_prefill_waits": "Times a waiting request was passed over while another one computed its prefix.",
    "kv_tokens_saved": "KV tokens that request-wise attention would have read in addition.",
}
METRICS = (
    *(Metric(f"{name}_total", text) for name, text in TOTALS.items()),
    Metric("packed_steps_total", "Steps that ran packed, by mode.", label="mode"),
    Metric(
        "one_token_steps_total",
        "Prefill (extend) and mixed steps with one token a request that ran as decode steps, by mode.",
        label="mode",
    ),
    Metric(
        "routed_steps_total",
        "Decode and verify steps that could run packed or stock, by route: packed or stock.",
        label="route",
    ),
    Metric("arm_steps_total", "Routed decode steps of live A/B tests, by arm: A or B.", label="arm"),
    Metric("arm_step_seconds_total", "Seconds of these steps, by arm; of those whose time is known.", label="arm"),
    Metric("arm_tokens_total", "Output tokens of these steps, by arm; of those whose time is known.", label="arm"),
    Metric("fallbacks_total", "Steps, or layers of packed steps, on the stock backend, by reason.", label="reason"),
    Metric(
        "kv_read_ratio",
        "KV tokens read by packed steps divided by those of request-wise attention, since the last update.",
        kind="gauge",
    ),
    Metric("failures_total", "Exceptions of prefixpack, which SGLang did not see, by part.", label="part"),
    Metric("disabled", "1 for each feature that is off, by its name and why.", "gauge", "feature reason"),
    Metric("wrapped", "1 for each stock backend that runs wrapped (wrap mode), by name.", "gauge", "stock_backend"),
    Metric("route_policy", "1 for each policy that routes decode or verify steps, by name.", "gauge", "policy"),
)


@dataclass
class MetricsExporter:
    """Copies `Counters` into Prometheus metrics.

    Args:
        labels: label values of every metric of this process.
        registry: where to register; None: prometheus_client's default, as SGLang does.
    """

    labels: dict[str, str]
    registry: Any = None
    _last_read: tuple[int, int] = field(default=(0, 0), repr=False)
    _policies: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._metrics = MetricSet(METRICS, self.labels, self.registry)

    @classmethod
    def of_server(cls, arguments: Any, ranks: Any) -> MetricsExporter | None:
        """The exporter of this process; None if the server, or this rank, exports no metrics.

        Args:
            arguments: SGLang's ServerArgs.
            ranks: what holds this process's ranks; None from 0.5.21 on, when SGLang's context does.
        """
        if not getattr(arguments, "enable_metrics", False):
            return None
        if ranks is None:
            from sglang.srt.runtime_context import get_parallel

            ranks = get_parallel()
        tp_rank = int(getattr(ranks, "tp_rank", 0) or 0)
        if not _exports(ranks, tp_rank) and not getattr(arguments, "enable_metrics_for_all_schedulers", False):
            return None
        labels = {
            "model_name": str(getattr(arguments, "served_model_name", None) or arguments.model_path),
            "engine_type": _engine_type(getattr(arguments, "disaggregation_mode", "null")),
            "tp_rank": str(tp_rank),
            "pp_rank": str(int(getattr(ranks, "pp_rank", 0) or 0)),
            "moe_ep_rank": str(int(getattr(ranks, "moe_ep_rank", 0) or 0)),
        }
        dp_rank = getattr(ranks, "dp_rank", None)
        if dp_rank is not None:
            labels["dp_rank"] = str(dp_rank)
        extra = getattr(arguments, "extra_metric_labels", None) or {}
        return cls(labels | {name: str(value) for name, value in extra.items()})

    def update(
        self,
        counters: Counters,
        wrapped: Sequence[str] = (),
        policies: Sequence[str] = (),
        disabled: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Brings the metrics up to date. Takes some microseconds, so it is not called in every step.

        Args:
            wrapped: names of the stock backends that run wrapped.
            policies: names of the routing policies in use.
            disabled: why a feature is off, by its name.
        """
        values: dict[str, float | dict[Any, float]] = {f"{name}_total": getattr(counters, name) for name in TOTALS}
        values["packed_steps_total"] = dict(counters.steps_packed)
        values["one_token_steps_total"] = dict(counters.one_token_steps)
        values["routed_steps_total"] = dict(counters.routed_steps)
        values["arm_steps_total"] = dict(counters.arm_steps)
        values["arm_step_seconds_total"] = dict(counters.arm_step_seconds)
        values["arm_tokens_total"] = dict(counters.arm_tokens)
        values["fallbacks_total"] = counters.fallbacks_by_key()
        values["failures_total"] = dict(counters.failures.counts)
        values["disabled"] = dict.fromkeys(disabled.items(), 1.0)
        read, per_request = counters.kv_tokens_read, counters.kv_tokens_per_request
        read_before, per_request_before = self._last_read
        if per_request > per_request_before:
            values["kv_read_ratio"] = (read - read_before) / (per_request - per_request_before)
        self._last_read = (read, per_request)
        values["wrapped"] = dict.fromkeys(wrapped, 1.0)
        values["route_policy"] = {**dict.fromkeys(self._policies, 0.0), **dict.fromkeys(policies, 1.0)}
        self._policies.update(policies)
        self._metrics.update(values)


def _engine_type(disaggregation_mode: str) -> str:
    """As `DisaggregationMode.to_engine_type` of SGLang has it."""
    return "unified" if disaggregation_mode == "null" else disaggregation_mode


def _exports(ranks: Any, tp_rank: int) -> bool:
    """Whether SGLang exports metrics of this rank's scheduler: with DP attention, of one for each batch."""
    rank = getattr(ranks, "attn_tp_rank", None)
    if rank is None:  # a runner of 0.5.14
        return tp_rank == 0
    return rank == 0 and not getattr(ranks, "attn_cp_rank", 0)
