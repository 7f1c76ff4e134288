"""What a running server tells: the state in /server_info and the Prometheus metrics."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.explain.server import ServerState
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state, server_info
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import GroupScheduler
from sgl_prefix_attn.sglang_plugin.telemetry.failures import OF_AN_EXCEPTION
from tests.sglang_plugin.fixture import Fixture

PATHS = [[(1, 0, 20), (2, 20, 26)], [(1, 0, 20), (2, 20, 26)], [(1, 0, 20)], []]


def answer() -> Any:
    return SimpleNamespace(internal_state={"world_size": 1})


def test_a_server_without_a_backend_of_ours_tells_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings asked for group scheduling alone."""
    plugin_state.reset()
    state = plugin_state.of_process(Settings(group_scheduling=True), "0.5.20")
    scheduler: Any = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(device="cpu", dtype=None)))
    exporter = Mock()
    monkeypatch.setattr(plugin_state.MetricsExporter, "of_server", lambda arguments, ranks: exporter)
    try:
        for result in (answer(), None):  # of get_internal_state and on_idle
            assert server_info.tell_without_backend(result, scheduler) is None
        assert not exporter.update.called
        admission = state.own(Admission, state.counters.failures)
        admission.enlist(state.own(GroupScheduler, state.counters.failures))
        admission.after_calc_priority(None, None, None)  # nothing to iterate over
        result = answer()
        server_info.tell_without_backend(result, scheduler, None)
        off = {"group_scheduling": OF_AN_EXCEPTION}
        told = {"disabled": off, "failures": {"group_scheduling": 1}}
        assert result.internal_state == {"world_size": 1, "prefixpack_scheduling": told}
        assert exporter.update.call_args.args[-1] == off
    finally:
        plugin_state.reset()


def test_a_server_without_metrics_is_asked_for_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang calls `on_idle` in a loop that waits for nothing."""
    plugin_state.reset()
    state = plugin_state.of_process(Settings(group_scheduling=True), "0.5.20")
    state.counters.failures.switch_off("group_scheduling", "of a test")
    scheduler: Any = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=None))
    facts = Mock(return_value=SimpleNamespace(server_args=SimpleNamespace(enable_metrics=False), ranks=None))
    monkeypatch.setattr(server_info.ServerFacts, "of", facts)
    try:
        for _ in range(3):
            server_info.tell_without_backend(None, scheduler)
        assert facts.call_count == 1
        assert state.counters.failures.counts == {}
    finally:
        plugin_state.reset()


class TestState:
    def test_it_joins_sglangs_answer_and_is_what_explain_reads(self) -> None:
        fixture = Fixture(PATHS, [30, 27, 25, 9])
        fixture.run()
        fixture.run(NOTHING)
        result = answer()
        assert server_info.after_get_internal_state(result, None, None) is None
        assert result.internal_state["world_size"] == 1
        told = json.loads(json.dumps(result.internal_state["prefixpack"]))
        ServerState.model_validate(told)
        assert told["version"] == 1
        assert told["sglang"] == "0.5.20"
        assert told["counters"]["steps_packed"] == {"decode": 1, "extend": 0, "mixed": 0, "verify": 0}
        assert told["counters"]["fallbacks"] == {"no_paths": 1}
        assert told["counters"]["kv_tokens_per_request"] == 30 + 27 + 25 + 9
        assert told["counters"]["kv_tokens_unique"] == 26 + 4 + 1 + 5 + 9
        assert told["shape"] == {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "kv_bytes": 4, "partial_bytes": 4}
        assert set(told["device"]) == set(asdict(fixture.backend._executor.planners[0].device))
        batch, forest = told["batch"], fixture.step.forest
        assert (batch["mode"], batch["seq_lens"], batch["query_lens"]) == ("decode", [30, 27, 25, 9], [1] * 4)
        rebuilt = PrefixForest.from_paths([[tuple(segment) for segment in path] for path in batch["paths"]])
        for name in ("node_begin", "node_end", "order"):
            assert getattr(rebuilt, name).tolist() == getattr(forest, name).tolist()

    def test_any_key_learns_nothing_of_prompts_and_of_batches_only_where_there_are_no_keys(self, monkeypatch) -> None:
        fixture = Fixture(PATHS, [30, 27, 25, 9])
        fixture.run()
        arguments = SimpleNamespace(api_key=None, admin_api_key=None)
        monkeypatch.setattr(versions, "server_args", lambda: arguments)
        for keys in ({}, {"api_key": "ORDINARY"}, {"admin_api_key": "ADMIN"}):
            vars(arguments).update(keys)
            result = answer()
            server_info.after_get_internal_state(result, None, None)
            told = result.internal_state["prefixpack"]
            assert (told["batch"] is None, told["tells_batch"]) == (bool(keys), not keys)
            assert "running" not in told
            assert ServerState.model_validate(json.loads(json.dumps(told))).tells_batch == (not keys)

    def test_without_a_prefixpack_backend_the_answer_stays_as_it_is(self) -> None:
        result = answer()
        server_info.after_get_internal_state(result)
        server_info.after_on_idle(None)
        assert result.internal_state == {"world_size": 1}

    def test_an_exception_leaves_sglangs_answer_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        fixture = Fixture(PATHS, [30, 27, 25, 9])
        result = SimpleNamespace(internal_state=None)
        server_info.after_get_internal_state(result)
        server_info.after_on_idle(None)
        assert fixture.state.counters.failures.counts == {"server_info": 1}
        assert "server_info failed; the answer lacks our state\nTraceback" in caplog.text
