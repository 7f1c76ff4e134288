"""Counters of pinning and retention in a scheduler process, and their Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sgl_prefix_attn.sglang_plugin.telemetry.failures import WITHOUT, Failures
from sgl_prefix_attn.sglang_plugin.telemetry.metrics import Metric, MetricSet


@dataclass
class PinningCounters:
    """Totals since the process started; the first two are current values.

    Attributes:
        pinned_tokens: distinct tokens of all pins.
        pins: number of pins.
        pins_made, pins_released, pins_expired: number of pins.
        pins_shed: how often a pin was ended or shortened to make room.
        tokens_shed: tokens of pins given up to make room.
        evictions_avoided: tokens that the least-recently-used order would have evicted and retention kept.
        recomputed_tokens: prompt tokens that were computed before and evicted since.
        retained_tokens: tokens that hints keep, whether cached or not; a current value.
        hints_executed, hints_ignored: hints of requests.
        superseded_tokens: cached tokens that a session needs no more.
        failures: exceptions in the hooks; SGLang continued without them.
        record: those of the process, by hook.
    """

    pinned_tokens: int = 0
    pins: int = 0
    pins_made: int = 0
    pins_released: int = 0
    pins_expired: int = 0
    pins_shed: int = 0
    tokens_shed: int = 0
    evictions_avoided: int = 0
    recomputed_tokens: int = 0
    retained_tokens: int = 0
    hints_executed: int = 0
    hints_ignored: int = 0
    superseded_tokens: int = 0
    failures: int = 0
    record: Failures = field(default_factory=Failures, repr=False, compare=False)

    def failed(self, part: str, error: BaseException, consequence: str = WITHOUT) -> None:
        """As `Failures.failed`."""
        self.failures += 1
        self.record.failed(part, error, consequence)

    def as_dict(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if name != "record"}


_METRICS = (
    Metric("pinned_tokens", "Distinct tokens that are pinned.", kind="gauge"),
    Metric("pins", "Pins.", kind="gauge"),
    Metric("pins_shed_total", "Pins ended or shortened to make room."),
    Metric("tokens_shed_total", "Tokens of pins given up to make room."),
    Metric(
        "evictions_avoided_total",
        "Tokens that the least-recently-used order would have evicted and retention kept.",
    ),
    Metric("recomputed_tokens_total", "Prompt tokens computed again although they had been computed before."),
    Metric("retained_tokens", "Tokens that KV hints keep.", kind="gauge"),
    Metric("hints_executed_total", "KV hints that were executed."),
    Metric("hints_ignored_total", "KV hints that were not executed."),
    Metric("superseded_tokens_total", "Cached tokens that their session needs no more."),
    Metric("pinning_failures_total", "Exceptions in the pinning hooks."),
)


class PinningMetrics:
    """Copies PinningCounters into Prometheus metrics, with the labels of SGLang's scheduler metrics.

    Args:
        labels: label values of every metric of this process.
        registry: where to register; None: prometheus_client's default, as SGLang does.
    """

    def __init__(self, labels: dict[str, str], registry: Any = None) -> None:
        self._metrics = MetricSet(_METRICS, labels, registry)

    def update(self, counters: PinningCounters) -> None:
        """Brings the metrics up to date."""
        values = counters.as_dict()
        names = {metric.name.removeprefix("pinning_").removesuffix("_total"): metric.name for metric in _METRICS}
        self._metrics.update({name: values[attribute] for attribute, name in names.items()})
