"""Counters of pinning and retention in a scheduler process, and their Prometheus metrics."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from sgl_prefix_attn.sglang_plugin.telemetry.metrics import PREFIX

logger = logging.getLogger(__name__)


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
        failures: exceptions in the hooks; SGLang continued without them.
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
        """Counts the exception being handled; the first is logged with its traceback."""
        if self.failures == 0:
            logger.exception("prefixpack: a pinning hook failed; SGLang continues without it")
        self.failures += 1

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


_GAUGES = {"pinned_tokens": "Distinct tokens that are pinned.", "pins": "Number of pins."}
_COUNTERS = {
    "pins_shed": "Pins ended or shortened to make room.",
    "tokens_shed": "Tokens of pins given up to make room.",
    "evictions_avoided": "Tokens that the least-recently-used order would have evicted and retention kept.",
    "recomputed_tokens": "Prompt tokens computed again although they had been computed before.",
    "failures": "Exceptions in the pinning hooks.",
}


@dataclass
class PinningMetrics:
    """Copies PinningCounters into Prometheus metrics, with the labels of SGLang's scheduler metrics."""

    labels: dict[str, str]
    registry: Any = None
    _metrics: dict[str, Any] = field(default_factory=dict, repr=False)
    _exported: dict[str, int] = field(default_factory=dict, repr=False)

    def update(self, counters: PinningCounters) -> None:
        if not self._metrics:
            self._create()
        values = counters.as_dict()
        for name in _GAUGES:
            self._metrics[name].labels(**self.labels).set(values[name])
        for name in _COUNTERS:
            growth = values[name] - self._exported.get(name, 0)
            self._metrics[name].labels(**self.labels).inc(growth)
            self._exported[name] = values[name]

    def _create(self) -> None:
        # Imported late: SGLang sets the multiprocess directory first.
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if self.registry is None else self.registry
        names = list(self.labels)
        for name, text in _GAUGES.items():
            self._metrics[name] = Gauge(PREFIX + name, text, names, registry=registry, multiprocess_mode="mostrecent")
        for name, text in _COUNTERS.items():
            title = f"{PREFIX}{'pinning_' if name == 'failures' else ''}{name}_total"
            self._metrics[name] = Counter(title, text, names, registry=registry)
