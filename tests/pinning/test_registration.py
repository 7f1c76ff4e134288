"""Unless pins or retention are asked for, SGLang is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("sglang")

from prometheus_client import CollectorRegistry

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin import hooks, pinning_hooks, pinning_registration
from sgl_prefix_attn.sglang_plugin.hooks import Hook
from sgl_prefix_attn.sglang_plugin.pinning_counters import PinningCounters, PinningMetrics


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hook]]:
    found: list[Hook] = []
    monkeypatch.setattr(hooks, "register", found.extend)
    yield found
    pinning_hooks.activate(None)


def test_by_default_nothing_is_hooked(registered: list[Hook]) -> None:
    pinning_registration.register(Settings(), in_scheduler=True)
    assert registered == []
    assert pinning_hooks.keeper_of(object()) is None


@pytest.mark.parametrize("settings", [Settings(pin_budget_percent=10), Settings(retention="reuse")])
def test_what_is_asked_for_is_hooked_in_schedulers(registered: list[Hook], settings: Settings) -> None:
    pinning_registration.register(settings, in_scheduler=True)
    assert registered == list(pinning_hooks.PINNING_HOOKS)


def test_retention_alone_adds_no_addresses(registered: list[Hook], monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_prefix_attn.sglang_plugin import pinning_client

    asked: list[str] = []
    monkeypatch.setattr(pinning_client, "add_routes_to_server", lambda: asked.append("routes"))
    pinning_registration.register(Settings(retention="reuse"), in_scheduler=False)
    assert asked == []
    pinning_registration.register(Settings(pin_budget_percent=1), in_scheduler=False)
    assert asked == ["routes"]
    assert registered == []


def test_metrics_follow_the_counters() -> None:
    registry = CollectorRegistry()
    metrics = PinningMetrics({"model_name": "m"}, registry)
    counters = PinningCounters(pinned_tokens=7, pins_shed=2)
    metrics.update(counters)
    counters.pinned_tokens, counters.pins_shed, counters.evictions_avoided = 3, 5, 11
    metrics.update(counters)
    labels = {"model_name": "m"}
    assert registry.get_sample_value("sglang:prefixpack_pinned_tokens", labels) == 3
    assert registry.get_sample_value("sglang:prefixpack_pins_shed_total", labels) == 5
    assert registry.get_sample_value("sglang:prefixpack_evictions_avoided_total", labels) == 11
    assert registry.get_sample_value("sglang:prefixpack_pinning_failures_total", labels) == 0
