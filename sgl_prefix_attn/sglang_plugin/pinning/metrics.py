"""What pinning and retention did in one scheduler process, and its Prometheus metrics."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from sgl_prefix_attn.sglang_plugin.telemetry.metrics import Metric, MetricSet

logger = logging.getLogger(__name__)


@dataclass
class PinningCounters:
    """Plain numbers; totals since the process started, but for the first two.

    Attributes:
        pinned_tokens: distinct tokens of all pins now.
        pins: pins now.
        pins_made, pins_released, pins_expired, pins_shed: pins so far, by how they began and ended; shed counts every
            time that one was ended or shortened to make room.
        tokens_shed: tokens of pins given up to make room.
        evictions_avoided: tokens that the least-recently-used order would have evicted and retention kept.
        recomputed_tokens: prompt tokens computed again although they had been computed before: what a pin, or a larger
            pool, would have saved.
        failures: exceptions in our hooks; each time SGLang went on as without us.
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
    failures: int = 0

    def failed(self) -> None:
        """Counts an exception of ours, to be called while it is handled; the first is logged with traceback."""
        if self.failures == 0:
            logger.exception("prefixpack pinning failed; SGLang goes on as without it")
        self.failures += 1

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


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
