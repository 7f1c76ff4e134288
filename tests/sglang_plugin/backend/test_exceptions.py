"""Exceptions of ours in steps: each costs a step, or the rest of one, and the numbers stay right."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_prefix_attn.core.planner import Planner
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import backend, server_info
from sgl_prefix_attn.sglang_plugin.dispatch import step_planner
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import StepKind, StepPlanner
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import LayerRegistry
from sgl_prefix_attn.sglang_plugin.execution.packed_step import PackedStep
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import MOST_FAILED_STEPS
from tests.sglang_plugin import fixture as small
from tests.sglang_plugin.fixture import LAYERS, Fixture
from tests.sglang_plugin.gpu_fixture import LENGTHS, SHARED, DecodeGraphs, GpuFixture, assert_same


class InjectedError(RuntimeError):
    """An exception of a test."""


def inject(
    patch: pytest.MonkeyPatch, owner: Any, name: str, error: type[Exception] = InjectedError
) -> Callable[[], None]:
    """Makes a function raise, from its first call on; returns what ends that."""
    original = getattr(owner, name)

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error(name)

    patch.setattr(owner, name, raises)
    return lambda: patch.setattr(owner, name, original)


BEFORE_LAYERS: list[tuple[Any, str]] = [
    (StepPlanner, "_unsupported"), (StepRouter, "decide"), (CpuExecutor, "host_lens"), (Planner, "plan"),
    (PackedStep, "of"), (CpuExecutor, "begin"), (LayerRegistry, "scan_model"), (StepRouter, "stays_stock"),
]  # fmt: skip
IN_LAYERS: list[tuple[Any, str]] = [
    (LayerRegistry, "facts"), (PackedStep, "unsupported_call"), (CpuExecutor, "unsupported_call"),
    (CpuExecutor, "attend"),
]  # fmt: skip


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


class TestEagerSteps:
    @pytest.mark.parametrize(("owner", "name"), BEFORE_LAYERS, ids=name_of)
    def test_before_the_first_layer_the_step_runs_stock(self, owner, name, monkeypatch, caplog):
        fixture = Fixture(small.SHARED, small.LENGTHS)
        end = inject(monkeypatch, owner, name)
        for _ in range(2):
            assert_same(fixture.run(), fixture.run_stock())
            if name == "scan_model":  # asked for again
                fixture.backend._layers.scanned = False
        assert fixture.stock.layer_calls == 2 * LAYERS
        assert fixture.fallbacks == {reasons.EXCEPTION: 2}
        assert fixture.state.counters.failures.counts == {"step": 2}
        assert caplog.text.count("Traceback") == 1
        assert "step failed; this step runs on the stock backend\nTraceback" in caplog.text
        end()
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.state.counters.steps_packed["decode"] == 1

    def test_a_steady_step_runs_stock_and_the_next_one_packed(self, monkeypatch):
        fixture = Fixture(small.SHARED, small.LENGTHS)
        fixture.run()
        fixture.grow(1)
        with monkeypatch.context() as broken:
            inject(broken, CpuExecutor, "begin")
            assert_same(fixture.run(), fixture.run_stock())
        fixture.grow(1)
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {reasons.EXCEPTION: 1}
        assert fixture.state.counters.steps_packed["decode"] == 2

    @pytest.mark.parametrize(("owner", "name"), IN_LAYERS, ids=name_of)
    @pytest.mark.parametrize("new", [None, [40, 5, 3, 9]], ids=["decode", "extend"])
    @pytest.mark.parametrize("layer", range(LAYERS))
    def test_from_the_layer_that_raised_on_the_step_runs_stock(self, owner, name, new, layer, monkeypatch):
        fixture = Fixture(small.SHARED, small.LENGTHS, new)
        original, calls = getattr(owner, name), []

        def raises_in_the_layer(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > layer:
                raise InjectedError
            return original(*args, **kwargs)

        fixture.backend._layers.scan_model()
        monkeypatch.setattr(owner, name, raises_in_the_layer)
        stored: list[int] = []
        store = fixture.pool.set_kv_buffer
        monkeypatch.setattr(
            fixture.pool, "set_kv_buffer", lambda at, *rest: (stored.append(at.layer_id), store(at, *rest))
        )
        out = fixture.run()
        assert stored == list(range(LAYERS)), "a pool with scales divides K and V in place"
        assert_same(out, fixture.run_stock())
        assert (fixture.stock.metadata_calls, fixture.stock.layer_calls) == (1, LAYERS - layer)
        assert fixture.fallbacks == {reasons.EXCEPTION: 1}
        assert fixture.state.counters.failures.counts == {"layer": 1}

    def test_an_exception_of_sglangs_own_store_is_not_ours(self, monkeypatch):
        fixture = Fixture(small.SHARED, small.LENGTHS)
        inject(monkeypatch, fixture.pool, "set_kv_buffer")
        with pytest.raises(InjectedError):
            fixture.run()
        assert fixture.fallbacks == {}

    @pytest.mark.parametrize("place", [(CpuExecutor, "host_lens"), (CpuExecutor, "attend")], ids=["step", "layer"])
    def test_after_several_steps_in_a_row_nothing_is_packed_any_more(self, place, monkeypatch, caplog):
        fixture = Fixture(small.SHARED, small.LENGTHS)
        end = inject(monkeypatch, *place)
        for _ in range(MOST_FAILED_STEPS - 1):
            fixture.run()
        end()
        fixture.run()  # one in between goes well
        assert fixture.state.disabled() == {}
        inject(monkeypatch, *place)
        for _ in range(MOST_FAILED_STEPS):
            assert_same(fixture.run(), fixture.run_stock())
        failed = 2 * MOST_FAILED_STEPS - 1
        assert fixture.fallbacks == {reasons.EXCEPTION: failed}
        packed = fixture.state.counters.steps_packed["decode"]
        for _ in range(3):
            assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {reasons.EXCEPTION: failed, reasons.STOPPED: 3}
        assert fixture.state.counters.steps_packed["decode"] == packed
        told = server_info.process_state(fixture.state)
        assert (told["disabled"], told["refused"]) == ({"packing": "stopped"}, "stopped")
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert sum("nothing is packed any more" in message for message in errors) == 1
        assert fixture.state.why_stock("decode") == reasons.STOPPED, "no paths are read for nothing"


class TestGraphs:
    """Decode graphs, of which each size has one for the stock backend too."""

    @pytest.fixture
    def routed(self) -> GpuFixture:
        settings = Settings(metrics=False, route="batch>=1")
        fixture = GpuFixture(SHARED, LENGTHS, settings=settings, stock_backend="fa3")
        fixture.graphs = DecodeGraphs(fixture, 4)
        fixture.graphs.capture(4)
        return fixture

    @pytest.mark.parametrize(
        ("owner", "name"),
        [(StepRouter, "decide"), (CudaExecutor, "host_lens"), (Planner, "plan"), (CudaExecutor, "begin")],
        ids=name_of,
    )  # fmt: skip
    def test_a_replay_takes_the_stock_backends_graph(self, owner, name, routed, monkeypatch):
        with monkeypatch.context() as broken:
            inject(broken, owner, name)
            assert_same(routed.graphs.replay(), routed.run_stock())
        assert routed.backend.decision.is_graph_variant
        assert routed.fallbacks == {reasons.EXCEPTION: 1}
        assert_same(routed.graphs.replay(), routed.run_stock())
        assert routed.backend.decision.kind is StepKind.PACKED

    def test_packing_stops_in_graphs_too(self, routed, monkeypatch):
        with monkeypatch.context() as broken:
            inject(broken, CudaExecutor, "begin")
            for _ in range(MOST_FAILED_STEPS):
                routed.graphs.replay()
        assert_same(routed.graphs.replay(), routed.run_stock())
        assert routed.backend.decision.is_graph_variant
        assert routed.fallbacks[reasons.STOPPED] == 1

    @pytest.mark.parametrize(("owner", "name"), [(Planner, "plan"), (PackedStep, "of")], ids=name_of)
    def test_of_several_ranks_one_that_fails_replays_the_graph_of_the_others(self, owner, name, routed, monkeypatch):
        monkeypatch.setattr(step_planner, "several_ranks", lambda: True)
        with monkeypatch.context() as broken:
            original, calls = getattr(owner, name), []

            def raises_once(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                if len(calls) == 1:
                    raise InjectedError
                return original(*args, **kwargs)

            broken.setattr(owner, name, raises_once)
            assert_same(routed.graphs.replay(), routed.run_stock())
        assert routed.backend.decision.kind is StepKind.UNSHARED
        with monkeypatch.context() as broken:  # the batch's fault: all ranks have it
            inject(broken, StepRouter, "decide")
            assert_same(routed.graphs.replay(), routed.run_stock())
            assert routed.backend.decision.is_graph_variant
        with monkeypatch.context() as broken:  # this rank's fault: the others may replay either graph
            inject(broken, StepRouter, "decide", MemoryError)
            with pytest.raises(MemoryError):
                routed.graphs.replay()

    def test_without_such_a_graph_requests_are_read_one_by_one(self, monkeypatch):
        fixture = GpuFixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="packed"), graphs=4)
        fixture.graphs.capture(4)
        with monkeypatch.context() as broken:
            inject(broken, CudaExecutor, "host_lens")
            assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.backend.decision.kind is StepKind.UNSHARED
        with monkeypatch.context() as broken:
            inject(broken, CudaExecutor, "begin")
            with pytest.raises(InjectedError):  # nothing else may run in its place
                fixture.graphs.replay()

    @pytest.mark.parametrize("ranks", [False, True])
    def test_a_layer_that_raises_in_a_capture_becomes_a_stock_layer(self, ranks, monkeypatch):
        monkeypatch.setattr(backend, "several_ranks", lambda: ranks)
        fixture = GpuFixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="packed"), graphs=4)
        original = CudaExecutor.attend

        def raises_in_the_second(self: Any, step: Any, index: int, q: Any, layer: Any, *args: Any) -> torch.Tensor:
            if layer.layer_id == 1:
                raise InjectedError
            return original(self, step, index, q, layer, *args)

        with monkeypatch.context() as broken:
            broken.setattr(CudaExecutor, "attend", raises_in_the_second)
            if ranks:
                with pytest.raises(InjectedError):
                    fixture.graphs.capture(4)
                return
            fixture.graphs.capture(4)
        for _ in range(2):
            assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.stock.graph_calls[-1] == "replay"

    def test_an_exception_in_the_decision_of_a_capture_reaches_sglang(self, monkeypatch):
        fixture = GpuFixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="packed"), graphs=4)
        inject(monkeypatch, CudaExecutor, "unshared")
        with pytest.raises(InjectedError):
            fixture.graphs.capture(4)

    @pytest.mark.parametrize("name", ["reserve_graphs", "seal"])
    def test_without_buffers_for_graphs_the_server_runs_stock(self, name, monkeypatch):
        inject(monkeypatch, CudaExecutor, name)
        fixture = GpuFixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="packed"), graphs=4)
        fixture.graphs.capture(4)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.state.disabled() == {"packing": "exception"}
        monkeypatch.setattr(backend, "several_ranks", lambda: True)
        with pytest.raises(InjectedError):
            GpuFixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="packed"), graphs=4)


def test_each_line_that_raises_is_logged_once(caplog):
    failures = Fixture(small.SHARED, small.LENGTHS).state.counters.failures
    for turn in range(3):
        with failures.guard("a hook"):
            raise InjectedError("first")
        with failures.guard("a hook"):
            raise InjectedError("second")
        assert failures.counts == {"a hook": 2 * turn + 2}
    assert re.findall("InjectedError: (.*)", caplog.text) == ["first", "second"]
    with pytest.raises(SystemExit), failures.guard("a hook"):
        raise SystemExit
