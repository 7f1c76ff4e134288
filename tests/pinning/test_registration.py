"""Unless pins or retention are asked for, SGLang is left alone; if they are, whatever process needs them has them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from prometheus_client import CollectorRegistry

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import hooks as compat_hooks
from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook
from sgl_prefix_attn.sglang_plugin.pinning import hooks, registration, state
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters, PinningMetrics
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    found: list[Hook] = []
    monkeypatch.setattr(compat_hooks, "register", found.extend)
    return found


@pytest.mark.parametrize("settings", [Settings(pin_budget_percent=10), Settings(retention="reuse")])
def test_what_is_asked_for_is_hooked_in_schedulers(registered: list[Hook], settings: Settings) -> None:
    registration.register(settings, in_scheduler=True)
    assert registered == list(hooks.pinning_hooks())


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows when addresses are added; the server's module counts as not imported."""
    from sgl_prefix_attn.sglang_plugin.pinning import client

    added: list[str] = []
    monkeypatch.setattr(client, "add_routes_to_server", lambda: added.append("routes"))
    monkeypatch.delitem(sys.modules, SERVER_MODULE, raising=False)
    return added


SERVER_MODULE = "sglang.srt.entrypoints.http_server"


def test_retention_alone_adds_no_addresses(registered: list[Hook], routes: list[str]) -> None:
    registration.register(Settings(retention="reuse"), in_scheduler=False)
    assert routes == []
    registration.register(Settings(pin_budget_percent=1), in_scheduler=False)
    assert routes == ["routes"]
    assert registered == []


def test_a_server_in_a_child_process_gets_addresses(
    registered: list[Hook], routes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has the scheduler's module and a parent, as a scheduler has.
    monkeypatch.setitem(sys.modules, SERVER_MODULE, ModuleType("http_server"))
    registration.register(Settings(pin_budget_percent=1), in_scheduler=True)
    assert routes == ["routes"]
    registration.register(Settings(retention="reuse"), in_scheduler=True)
    assert routes == ["routes"]


def test_a_child_process_that_imports_the_server_later_gets_addresses(
    registered: list[Hook], routes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace())
    registration.register(Settings(pin_budget_percent=1), in_scheduler=False)
    assert routes == ["routes"]


class TestInTheBackendsFactory:
    """Where a scheduler is no child process of multiprocessing (an actor), only the factory knows that it is one."""

    @pytest.fixture
    def applied(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hook]]:
        from sgl_prefix_attn.sglang_plugin import factory
        from sgl_prefix_attn.sglang_plugin.backend import plugin_state
        from tests.sglang_plugin.fixture import Fixture

        asked: list[Hook] = []
        monkeypatch.setattr(factory.hooks, "ensure_applied", lambda wanted: asked.extend(wanted) or [])
        self.runner = Fixture([[]], [9]).runner
        plugin_state.reset()
        yield asked
        plugin_state.reset()
        state.activate(None)

    def create(self, settings: Settings) -> None:
        from sgl_prefix_attn.sglang_plugin.factory import create_backend

        create_backend(self.runner, settings)

    def test_what_is_asked_for_is_hooked_there(self, applied: list[Hook]) -> None:
        self.create(Settings(metrics=False, pin_budget_percent=10))
        assert [hook for hook in applied if hook in hooks.pinning_hooks()] == list(hooks.pinning_hooks())
        assert state.current()

    def test_in_one_go_with_the_others_and_after_them(self, applied: list[Hook]) -> None:
        # SGLang's registry never looks at a function again that it has hooked; and the queue has to be in its order.
        self.create(Settings(metrics=False, retention="reuse", group_scheduling=True))
        queue = [hook for hook in applied if hook.target == hooks.CALC_PRIORITY]
        assert [hook.function.__module__.rpartition(".")[2] for hook in queue] == ["group_scheduler", "hooks"]

    def test_what_has_been_pinned_stays(self, applied: list[Hook]) -> None:
        state.activate(PinningSettings(budget_percent=10))
        before = state.current()
        self.create(Settings(metrics=False, pin_budget_percent=10))
        assert state.current() is before


class Broken:
    """Prometheus metrics whose files are gone."""

    def update(self, counters: PinningCounters) -> None:
        raise OSError("no space left on device")


class TestInternalState:
    @pytest.fixture
    def server(self) -> Iterator[Any]:
        from tests.pinning.generations import CACHES
        from tests.pinning.small_server import SmallServer

        yield SmallServer(CACHES[0], slots=64, settings=PinningSettings(budget_percent=10))
        state.activate(None)

    def ask(self, server: Any) -> dict[str, Any]:
        answer = SimpleNamespace(internal_state={"world_size": 1})
        request = SimpleNamespace(rid=None)
        result = hooks.around_get_internal_state(lambda scheduler, request: answer, server, request)
        assert result is answer
        return dict(result.internal_state)

    def test_it_has_our_counters(self, server: Any) -> None:
        assert self.ask(server) == {"world_size": 1, "prefixpack_pinning": PinningCounters().as_dict()}

    def test_metrics_that_fail_are_counted_and_logged_once_and_the_answer_arrives(
        self, server: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        state.current().metrics = Broken()
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert self.ask(server)["world_size"] == 1
        assert server.manager.counters.failures == 3
        assert caplog.text.count("Traceback") == 1

    def test_a_cache_that_no_manager_can_be_made_for_is_logged_once(
        self, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(tree: Any) -> None:
            raise RuntimeError("a cache of another release")

        monkeypatch.setattr(state, "lockable_tree", broken)
        with caplog.at_level(logging.ERROR):
            assert self.ask(server) == {"world_size": 1}
            assert self.ask(server) == {"world_size": 1}
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
