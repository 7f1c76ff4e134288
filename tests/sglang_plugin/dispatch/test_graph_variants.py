"""Decode graphs for either route, without a GPU: what is captured, which graph a step replays, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch import graph_variants
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.fixture import LAYERS
from tests.sglang_plugin.gpu_fixture import LENGTHS, SHARED, DecodeGraphs, GpuFixture, assert_same

# At first each distinct KV token is read 2.7 times, and 2.5 times once the requests have grown by 128 tokens.
BORDER = "reuse>=2.6"
ALWAYS_STOCK = "batch>=1000"
ALWAYS_PACKED = "batch>=1"


Routed = Callable[..., GpuFixture]


@pytest.fixture
def routed() -> Routed:
    """Makes worlds whose steps are routed by a policy, with graphs of some sizes."""

    def make(route: str, *sizes: int, hooked: bool = True) -> GpuFixture:
        settings = Settings(metrics=False, route=route)
        fixture = GpuFixture(SHARED, LENGTHS, settings=settings, stock_backend="fa3", room=256)
        if sizes:
            fixture.graphs = DecodeGraphs(fixture, max(sizes), hooked=hooked)
            for size in sorted(sizes, reverse=True):
                fixture.graphs.capture(size)
        return fixture

    return make


def routes(fixture: GpuFixture) -> dict[str, int]:
    return dict(fixture.state.counters.routed_steps)


class TestCapture:
    def test_the_stock_graph_holds_the_stock_backend_alone(self, routed: Routed) -> None:
        fixture = routed(BORDER, 4)
        warm_up = ["in graph", "warm"]
        assert fixture.stock.graph_calls == ["state 4", "capture", *warm_up, *warm_up, "in graph"]
        before = fixture.device_step.attended
        for launch in fixture.graphs.stock_graph(4)[0]:
            launch()
        assert fixture.device_step.attended == before

    @pytest.mark.parametrize("route", ["packed", "stock"])
    def test_a_fixed_route_has_one_graph_for_each_size(self, route: Any) -> None:
        settings = Settings(metrics=False, route=route)
        fixture = GpuFixture(SHARED, LENGTHS, settings=settings, stock_backend="fa3", graphs=4)
        fixture.graphs.capture(4)
        assert list(fixture.graphs.graphs) == [ShapeKey(4)]
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert bool(fixture.steps) == (route == "packed"), "a server that never runs packed needs no buffers"

    def test_over_torch_native_every_step_runs_packed(self) -> None:
        fixture = GpuFixture(SHARED, LENGTHS, stock_backend="torch_native", graphs=4)
        fixture.graphs.capture(4)
        assert list(fixture.graphs.graphs) == [ShapeKey(4)]

    @pytest.mark.parametrize(("route", "packed"), [("batch>=3", True), ("batch>=5", False)])
    def test_policies_have_both_graphs(self, route: str, packed: bool) -> None:
        settings = Settings(metrics=False, route=route)
        fixture = GpuFixture(SHARED, LENGTHS, settings=settings, stock_backend="torch_native", graphs=4)
        fixture.graphs.capture(4)
        assert len(fixture.graphs.graphs) == 2
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert routes(fixture) == {"packed": int(packed), "stock": int(not packed)}

    def test_without_the_hook_on_keys_there_is_no_second_graph(self, routed, caplog):
        """It would lie under the key of the first."""
        fixture = routed(ALWAYS_STOCK, 4, hooked=False)
        assert list(fixture.graphs.graphs) == [ShapeKey(4)]
        assert "does not ask for graph keys" in caplog.text
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.state.counters.steps_packed["decode"] == 1

    def test_a_backend_behind_one_for_linear_attention_is_found(self, routed: Routed) -> None:
        """Newer versions put that one before the one for prefill and decode, older ones behind it."""
        fixture = routed(BORDER)
        linear = SimpleNamespace(linear_attn_backend=SimpleNamespace())
        of_both = SimpleNamespace(full_attn_backend=fixture.backend, **vars(linear))
        decode = SimpleNamespace(prefill_backend=fixture.stock, decode_backend=fixture.backend)
        for outermost in (
            of_both,
            SimpleNamespace(full_attn_backend=decode, **vars(linear)),
            SimpleNamespace(prefill_backend=fixture.stock, decode_backend=of_both),
        ):
            found = graph_variants.packing_backend(SimpleNamespace(attn_backend=outermost))
            assert found is fixture.backend
        none = SimpleNamespace(full_attn_backend=fixture.stock, **vars(linear))
        assert graph_variants.packing_backend(SimpleNamespace(attn_backend=none)) is None


class TestFailedCapture:
    @staticmethod
    def fail_from(fixture: GpuFixture, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        original = fixture.stock.init_forward_metadata_out_graph

        def out_of_memory(forward_batch: Any, in_capture: bool = False) -> None:
            if in_capture and forward_batch.batch_size <= size:
                raise torch.OutOfMemoryError("no memory is left")
            original(forward_batch, in_capture)

        monkeypatch.setattr(fixture.stock, "init_forward_metadata_out_graph", out_of_memory)

    def test_the_server_goes_on_with_what_there_is_and_says_so_once(self, routed, monkeypatch, caplog):
        fixture = routed(ALWAYS_STOCK)
        self.fail_from(fixture, 6, monkeypatch)
        fixture.graphs = DecodeGraphs(fixture, 8)
        for size in (8, 6, 4):
            fixture.graphs.capture(size)
        assert fixture.backend.graph_variants.sizes == [8]
        assert caplog.text.count("hold packed layers only") == 1
        assert "decode graphs of fewer than 8 requests" in caplog.text
        for size in (8, 6, 4):
            assert_same(fixture.graphs.replay(size=size), fixture.run_stock())
        assert routes(fixture) == {"packed": 0, "stock": 1}
        assert fixture.state.counters.steps_packed["decode"] == 2

    def test_ranks_that_capture_in_step_fail_together(self, routed, monkeypatch, caplog):
        monkeypatch.setattr(graph_variants, "several_ranks", lambda: True)
        fixture = routed(ALWAYS_STOCK)
        self.fail_from(fixture, 8, monkeypatch)
        fixture.graphs = DecodeGraphs(fixture, 8)
        with pytest.raises(torch.OutOfMemoryError):
            fixture.graphs.capture(8)
        assert "PREFIXPACK_ROUTE=packed" in caplog.text
        assert not fixture.backend.graph_variants.capturing


class TestReplay:
    @pytest.mark.parametrize("size", [4, 5, 8])
    def test_a_step_that_is_cheaper_there_replays_the_stock_graph(self, routed: Routed, size: int) -> None:
        fixture = routed(ALWAYS_STOCK, size)
        prepared = fixture.device_step.prepared
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.stock.graph_calls[-1] == "replay"
        assert fixture.device_step.prepared == prepared, "nothing of ours is to be paid for"
        assert routes(fixture) == {"packed": 0, "stock": 1}
        assert fixture.fallbacks == {}, "a route is no fallback"

    def test_a_step_that_is_cheaper_packed_costs_the_stock_backend_nothing(self, routed: Routed) -> None:
        fixture = routed(ALWAYS_PACKED, 4)
        calls = list(fixture.stock.graph_calls)
        for _ in range(STEPS_BETWEEN_PLANS + 2):
            assert_same(fixture.graphs.replay(), fixture.run_stock())
            fixture.grow(1)
        assert fixture.stock.graph_calls == calls
        assert routes(fixture) == {"packed": STEPS_BETWEEN_PLANS + 2, "stock": 0}

    def test_routes_that_take_turns(self, routed: Routed) -> None:
        fixture = routed(BORDER, 4)
        for longer in (0, 128):
            fixture.grow(longer)
            for handed in (None, NOTHING, None, NOTHING):
                fixture.backend._record.router._stock_steps.clear()  # look at every step
                assert_same(fixture.graphs.replay(handed), fixture.run_stock())
        assert routes(fixture) == {"packed": 2, "stock": 2}

    def test_steady_steps_are_not_looked_at(self, routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = routed(ALWAYS_STOCK, 4)
        looks = []
        host_lens = fixture.executor.host_lens
        monkeypatch.setattr(fixture.executor, "host_lens", lambda *args: looks.append(1) or host_lens(*args))
        for _ in range(2 * STEPS_BETWEEN_PLANS):
            fixture.graphs.replay()
        assert len(looks) == 2
        assert routes(fixture)["stock"] == 2 * STEPS_BETWEEN_PLANS

    @pytest.mark.parametrize("handed", [NOTHING, Handed(reasons.BEAM_ROWS), Handed(reasons.NO_RADIX_CACHE)])
    def test_steps_without_paths_replay_the_stock_graph(self, routed: Routed, handed: Handed) -> None:
        fixture = routed(ALWAYS_PACKED, 8)
        assert_same(fixture.graphs.replay(handed), fixture.run_stock())
        assert fixture.fallbacks == {handed.paths: 1}
        assert fixture.stock.graph_calls[-1] == "replay"
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert routes(fixture) == {"packed": 1, "stock": 0}

    def test_eager_steps_are_routed_too(self, routed: Routed) -> None:
        fixture = routed(ALWAYS_STOCK)
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.stock.metadata_calls == 1
        assert fixture.stock.layer_calls == LAYERS
        assert routes(fixture) == {"packed": 0, "stock": 1}

    def test_graphs_of_other_modes_keep_their_keys(self, routed: Routed) -> None:
        fixture = routed(ALWAYS_STOCK, 4)
        fixture.graphs.replay()
        view = SimpleNamespace(**vars(fixture.batch))
        view.forward_mode = ForwardMode.TARGET_VERIFY
        fixture.backend.init_forward_metadata_out_graph(view)
        assert fixture.graphs._key(4) == ShapeKey(4)

    def test_prefill_is_not_routed(self) -> None:
        settings = Settings(metrics=False, route=ALWAYS_STOCK, pack_extend=True)
        fixture = GpuFixture(SHARED, LENGTHS, [4, 1, 5, 9], settings=settings, stock_backend="fa3")
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.state.counters.steps_packed["extend"] == 1
        assert routes(fixture) == {"packed": 0, "stock": 0}


@pytest.mark.skipif(not hasattr(base_attn_backend, "SharedReadEnds"), reason="SGLang 0.5.18 and later ask")
class TestFence:
    """The scheduler may change its tables for the next step as soon as a step's reads of them are over."""

    def test_with_graphs_for_either_route_the_later_end_holds(self, routed: Routed) -> None:
        fixture = routed(BORDER, 4)
        stock = fixture.stock.shared_read_ends(ForwardMode.DECODE)
        assert stock is base_attn_backend.SharedReadEnds.IN_REPLAY
        assert fixture.backend.shared_read_ends(ForwardMode.DECODE) is stock
