"""Unless pins or retention are asked for, SGLang is left alone; if they are, whatever process needs them has them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("sglang")

from prometheus_client import CollectorRegistry

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.compat import hooks as compat_hooks
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook
from sgl_prefix_attn.sglang_plugin.compat.pinning_targets import FLUSH, RUN_BATCH
from sgl_prefix_attn.sglang_plugin.compat.targets import ADD_ONE_REQ, CALC_PRIORITY
from sgl_prefix_attn.sglang_plugin.pinning import client, registration
from sgl_prefix_attn.sglang_plugin.pinning import state as pinning_state
from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningHooks
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters, PinningMetrics
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import GroupScheduler
from sgl_prefix_attn.sglang_plugin.scheduling.shared_prefill import SharedPrefill
from sgl_prefix_attn.sglang_plugin.startup import entry, factory, hook_table
from tests.pinning.small_server import SmallServer
from tests.sglang_plugin.fixture import Fixture
from tests.support.caches import CACHES

PINNING, GROUPS = {RUN_BATCH, FLUSH, CALC_PRIORITY, ADD_ONE_REQ}, {RUN_BATCH, CALC_PRIORITY, ADD_ONE_REQ}


_ASKED = pytest.mark.parametrize(
    ("asked", "hooked"),
    [
        ({}, PINNING if versions.has_kv_hints() else set()), ({"retention": "off"}, set()),
        ({"pin_budget_percent": 10}, PINNING), ({"retention": "reuse"}, PINNING),
        ({"group_scheduling": True, "retention": "off"}, GROUPS),
    ],
)  # fmt: skip


@_ASKED
def test_what_is_asked_for_is_hooked_in_schedulers(asked, hooked, monkeypatch):
    registered: list[Hook] = []
    monkeypatch.setattr(compat_hooks, "register", registered.extend)
    entry.register_hooks(Settings(**asked), "0.5.20")
    plugin_state.reset()
    assert {hook.target for hook in registered} & PINNING == hooked


@_ASKED
def test_in_wrap_mode_a_scheduler_has_what_is_asked_for_before_any_backend(asked, hooked, routes, monkeypatch):
    """Also where no backend will be wrapped. Hooks of packed steps are not among them."""
    plugin_state.reset()
    registered: list[Hook] = []
    monkeypatch.setattr(compat_hooks, "register", registered.extend)
    monkeypatch.setattr(entry, "in_scheduler_process", lambda: True)
    monkeypatch.setattr(entry, "register_wrapping", lambda settings: None)
    monkeypatch.setattr(entry, "load_settings", lambda: Settings(wrap=True, **asked))
    entry.register()
    assert {hook.target for hook in registered} & PINNING == hooked
    assert bool(registered) == bool(hooked)
    assert {hook.function for hook in registered}.isdisjoint(hook.function for hook in hook_table.OTHER_HOOKS)
    assert bool(plugin_state.active()) == bool(hooked)


@pytest.mark.parametrize(("value", "read"), [("1", False), ("TRUE", False), ("0", True), ("", True)])
@pytest.mark.parametrize("retention", ["hints", "reuse"])
def test_hints_that_the_rust_server_passes_on_unchecked_are_not_read(retention, value, read, monkeypatch):
    monkeypatch.setattr(versions, "has_kv_hints", lambda: True)
    monkeypatch.setenv("SGLANG_RUST_SERVER", value)
    why_not = registration.why_not_read(retention, SimpleNamespace())
    assert (why_not is None) == read
    assert read or "SGLANG_RUST_SERVER" in why_not


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows when the endpoint is added; the server's module counts as not imported."""
    added: list[str] = []
    monkeypatch.setattr(client, "add_routes_to_server", lambda: added.append("routes"))
    monkeypatch.delitem(sys.modules, SERVER_MODULE, raising=False)
    return added


SERVER_MODULE = "sglang.srt.entrypoints.http_server"


def test_retention_alone_adds_no_endpoint(routes: list[str]) -> None:
    registration.add_endpoints(Settings(retention="reuse"), in_scheduler=False)
    assert routes == []
    registration.add_endpoints(Settings(pin_budget_percent=1), in_scheduler=False)
    assert routes == ["routes"]


def test_a_server_in_a_child_process_gets_the_endpoint(routes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # It has the scheduler's module and a parent, as a scheduler has.
    monkeypatch.setitem(sys.modules, SERVER_MODULE, ModuleType("http_server"))
    registration.add_endpoints(Settings(pin_budget_percent=1), in_scheduler=True)
    assert routes == ["routes"]
    registration.add_endpoints(Settings(retention="reuse"), in_scheduler=True)
    assert routes == ["routes"]


def test_a_child_process_that_imports_the_server_later_gets_the_endpoint(routes, monkeypatch):
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace())
    registration.add_endpoints(Settings(pin_budget_percent=1), in_scheduler=False)
    assert routes == ["routes"]


def test_the_backends_factory_hooks_the_queue_once_and_puts_it_in_order_first(monkeypatch):
    # Retention has to see the queue in its final order.
    applied: list[Hook] = []
    monkeypatch.setattr(factory.hooks, "ensure_applied", lambda wanted: applied.extend(wanted) or [])
    runner = Fixture([[]], [9]).runner
    plugin_state.reset()
    factory.create_backend(runner, Settings(metrics=False, retention="reuse", group_scheduling=True))
    plugin_state.reset()
    owners = [getattr(hook.function, "__self__", None) for hook in applied if hook.target == CALC_PRIORITY]
    (admission,) = owners
    assert list(map(type, admission._gatekeepers)) == [SharedPrefill, GroupScheduler, PinningHooks]


class TestInternalState:
    @pytest.fixture
    def server(self) -> SmallServer:
        return SmallServer(CACHES[0], slots=64, settings=PinningSettings(budget_percent=10))

    def ask(self, server: Any) -> dict[str, Any]:
        answer = SimpleNamespace(internal_state={"world_size": 1})
        request = SimpleNamespace(rid=None)
        result = server.hooks.around_get_internal_state(lambda scheduler, request: answer, server, request)
        assert result is answer
        return dict(result.internal_state)

    def test_it_has_our_counters(self, server: Any) -> None:
        assert self.ask(server) == {"world_size": 1, "prefixpack_pinning": PinningCounters().as_dict()}

    def test_metrics_that_fail_are_counted_and_logged_once_and_the_answer_arrives(self, server, caplog):
        # As Prometheus' when its files are gone.
        server.hooks.state.metrics = SimpleNamespace(update=Mock(side_effect=OSError("no space left on device")))
        for _ in range(3):
            assert self.ask(server)["world_size"] == 1
        assert server.manager.counters.failures == 3
        assert caplog.text.count("Traceback") == 1

    def test_a_cache_that_no_manager_can_be_made_for_is_logged_once(self, server, monkeypatch, caplog):
        error = RuntimeError("a cache of another release")
        monkeypatch.setattr(pinning_state, "lockable_tree", Mock(side_effect=error))
        off = {"disabled": {"pin_budget_percent": "an exception, which the log has"}}
        assert self.ask(server) == {"world_size": 1, "prefixpack_pinning": off}
        assert self.ask(server) == {"world_size": 1, "prefixpack_pinning": off}
        assert caplog.text.count("Traceback") == 1


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
