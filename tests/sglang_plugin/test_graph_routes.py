"""Decode graphs for either route, without a GPU: what is captured, which graph a step replays, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey

from sgl_prefix_attn.core.step_buffers import PlanTooLarge
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import runtime
from sgl_prefix_attn.sglang_plugin.backend.server_info import process_state
from sgl_prefix_attn.sglang_plugin.dispatch import graph_variants
from sgl_prefix_attn.sglang_plugin.execution.executor import STEPS_WITHOUT_A_LOOK
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.routing.profiles import write_profile
from tests.sglang_plugin.attention_world import LAYERS
from tests.sglang_plugin.gpu_world import DecodeGraphs, GpuWorld
from tests.sglang_plugin.test_cuda_steps import LENGTHS, SHARED, assert_same

# Steps run packed once the longest request has more than 2,700 tokens; at first it has 2,640.
BORDER = {"packed": {"launch": 27.0}, "stock": {"longest_request": 10.0}}
ALWAYS_STOCK = {"packed": {"launch": 1000.0}, "stock": {"launch": 1.0}}
ALWAYS_PACKED = {"packed": {"launch": 1.0}, "stock": {"launch": 1000.0}}


@pytest.fixture(autouse=True)
def _one_runtime_per_test() -> Iterator[None]:
    yield
    runtime.stop()


class Routed:
    """Makes worlds whose steps are routed by a profile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, profile: dict[str, Any], *sizes: int, hooked: bool = True, **options: Any) -> GpuWorld:
        path = write_profile(self.folder, profile["packed"], profile["stock"], kernels="native", backend="fa3")
        settings = Settings(metrics=False, route_profile=path, route_margin=0)
        world = GpuWorld(SHARED, LENGTHS, settings=settings, stock_backend="fa3", room=256, **options)
        if sizes:
            world.graphs = DecodeGraphs(world, max(sizes), hooked=hooked)
            for size in sorted(sizes, reverse=True):
                world.graphs.capture(size)
        return world


@pytest.fixture
def routed(tmp_path: Path) -> Routed:
    return Routed(tmp_path)


def routes(world: GpuWorld) -> dict[str, int]:
    return dict(world.runtime.counters.routed_steps)


class TestCapture:
    def test_each_size_has_a_graph_for_either_route(self, routed: Routed) -> None:
        world = routed(BORDER, 4, 8)
        assert world.backend.graph_routes.sizes == [4, 8]
        labels = [(key.size, key.variant_label) for key in world.graphs.graphs]
        assert labels == [(8, None), (8, graph_variants.LABEL), (4, None), (4, graph_variants.LABEL)]

    def test_the_stock_graph_holds_the_stock_backend_alone(self, routed: Routed) -> None:
        world = routed(BORDER, 4)
        warm_up = ["in graph", "warm"]
        assert world.stock.graph_calls == ["state 4", "capture", *warm_up, *warm_up, "in graph"]
        before = world.device_step.attended
        for launch in world.graphs.stock_graph(4)[0]:
            launch()
        assert world.device_step.attended == before

    def test_a_label_that_sglang_gave_is_kept(self) -> None:
        routes = graph_variants.GraphRoutes(lambda mode: True)
        routes.capturing = True
        assert routes.key(ShapeKey(4, variant_label="lora")).variant_label == "lora+prefixpack-stock"

    @pytest.mark.parametrize("route", ["packed", "stock"])
    def test_a_fixed_route_has_one_graph_for_each_size(self, route: Any) -> None:
        world = GpuWorld(SHARED, LENGTHS, settings=Settings(metrics=False, route=route), stock_backend="fa3", graphs=4)
        world.graphs.capture(4)
        assert list(world.graphs.graphs) == [ShapeKey(4)]
        assert_same(world.graphs.replay(), world.run_stock())
        assert bool(world.steps) == (route == "packed"), "a server that never runs packed needs no buffers"

    def test_a_server_whose_kernels_the_profile_does_not_know_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        world = GpuWorld(SHARED, LENGTHS, stock_backend="torch_native", graphs=4)
        world.graphs.capture(4)
        assert list(world.graphs.graphs) == [ShapeKey(4)]
        assert "no cost of stock kernel 'torch_native', so all decode steps run packed" in caplog.text

    def test_packed_graphs_with_stock_layers_stay_the_only_ones(self, routed: Routed) -> None:
        world = routed(BORDER)
        world.layers[1].attn_type = AttentionType.DECODER_BIDIRECTIONAL
        world.graphs = DecodeGraphs(world, 4)
        world.graphs.capture(4)
        assert list(world.graphs.graphs) == [ShapeKey(4)]

    def test_without_the_hook_on_keys_there_is_no_second_graph(
        self, routed: Routed, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It would lie under the key of the first."""
        world = routed(ALWAYS_STOCK, 4, hooked=False)
        assert list(world.graphs.graphs) == [ShapeKey(4)]
        assert "does not ask for graph keys" in caplog.text
        assert_same(world.graphs.replay(), world.run_stock())
        assert world.runtime.counters.steps_packed["decode"] == 1

    def test_graphs_that_sglang_captures_anew(self, routed: Routed) -> None:
        world = routed(ALWAYS_STOCK, 4)
        world.graphs.replay()
        world.graphs.graphs.clear()
        world.graphs.capture(4)
        assert len(world.graphs.graphs) == 2
        assert_same(world.graphs.replay(), world.run_stock())

    def test_a_backend_behind_another_one_for_prefill_is_found(self, routed: Routed) -> None:
        world = routed(BORDER)
        hybrid = SimpleNamespace(prefill_backend=world.stock, decode_backend=world.backend)
        assert graph_variants.routes_of(SimpleNamespace(attn_backend=hybrid)) is world.backend.graph_routes
        assert graph_variants.routes_of(SimpleNamespace(attn_backend=world.stock)) is None

    def test_a_backend_behind_one_for_linear_attention_is_found(self, routed: Routed) -> None:
        """Newer versions put that one before the one for prefill and decode, older ones behind it."""
        world = routed(BORDER)
        linear = SimpleNamespace(linear_attn_backend=SimpleNamespace())
        of_both = SimpleNamespace(full_attn_backend=world.backend, **vars(linear))
        decode = SimpleNamespace(prefill_backend=world.stock, decode_backend=world.backend)
        for outermost in (
            of_both,
            SimpleNamespace(full_attn_backend=decode, **vars(linear)),
            SimpleNamespace(prefill_backend=world.stock, decode_backend=of_both),
        ):
            found = graph_variants.routes_of(SimpleNamespace(attn_backend=outermost))
            assert found is world.backend.graph_routes
        none = SimpleNamespace(full_attn_backend=world.stock, **vars(linear))
        assert graph_variants.routes_of(SimpleNamespace(attn_backend=none)) is None

    def test_a_runner_without_a_backend_has_none(self) -> None:
        assert graph_variants.routes_of(SimpleNamespace()) is None


class TestFailedCapture:
    @staticmethod
    def fail_from(world: GpuWorld, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        original = world.stock.init_forward_metadata_out_graph

        def out_of_memory(forward_batch: Any, in_capture: bool = False) -> None:
            if in_capture and forward_batch.batch_size <= size:
                raise torch.OutOfMemoryError("no memory is left")
            original(forward_batch, in_capture)

        monkeypatch.setattr(world.stock, "init_forward_metadata_out_graph", out_of_memory)

    def test_the_server_goes_on_with_what_there_is_and_says_so_once(
        self, routed: Routed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        world = routed(ALWAYS_STOCK)
        self.fail_from(world, 6, monkeypatch)
        world.graphs = DecodeGraphs(world, 8)
        for size in (8, 6, 4):
            world.graphs.capture(size)
        assert world.backend.graph_routes.sizes == [8]
        assert caplog.text.count("hold packed layers only") == 1
        assert "decode graphs of fewer than 8 requests" in caplog.text
        for size in (8, 6, 4):
            assert_same(world.graphs.replay(size=size), world.run_stock())
        assert routes(world) == {"packed": 0, "stock": 1}
        assert world.runtime.counters.steps_packed["decode"] == 2

    def test_ranks_that_capture_in_step_fail_together(
        self, routed: Routed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(graph_variants, "several_ranks", lambda: True)
        world = routed(ALWAYS_STOCK)
        self.fail_from(world, 8, monkeypatch)
        world.graphs = DecodeGraphs(world, 8)
        with pytest.raises(torch.OutOfMemoryError):
            world.graphs.capture(8)
        assert "PREFIXPACK_ROUTE=packed" in caplog.text
        assert not world.backend.graph_routes.capturing


class TestReplay:
    @pytest.mark.parametrize("size", [4, 5, 8])
    def test_a_step_that_is_cheaper_there_replays_the_stock_graph(self, routed: Routed, size: int) -> None:
        world = routed(ALWAYS_STOCK, size)
        prepared = world.device_step.prepared
        assert_same(world.graphs.replay(), world.run_stock())
        assert world.stock.graph_calls[-1] == "replay"
        assert world.device_step.prepared == prepared, "nothing of ours is to be paid for"
        assert routes(world) == {"packed": 0, "stock": 1}
        assert world.fallbacks == {}, "a route is no fallback"

    def test_a_step_that_is_cheaper_packed_costs_the_stock_backend_nothing(self, routed: Routed) -> None:
        world = routed(ALWAYS_PACKED, 4)
        calls = list(world.stock.graph_calls)
        for _ in range(STEPS_WITHOUT_A_LOOK + 2):
            assert_same(world.graphs.replay(), world.run_stock())
            world.grow(1)
        assert world.stock.graph_calls == calls
        assert routes(world) == {"packed": STEPS_WITHOUT_A_LOOK + 2, "stock": 0}

    def test_a_growing_batch_changes_its_route_midway(self, routed: Routed) -> None:
        world = routed(BORDER, 4)
        taken = []
        for _ in range(16):
            assert_same(world.graphs.replay(), world.run_stock())
            taken.append("stock" if world.backend._step is None else "packed")
            world.grow(8)
        assert taken == sorted(taken, reverse=True), "from stock to packed, once"
        assert set(taken) == {"stock", "packed"}

    def test_routes_that_take_turns(self, routed: Routed) -> None:
        world = routed(BORDER, 4)
        for longer in (0, 128):
            world.grow(longer)
            for handed in (None, NOTHING, None, NOTHING):
                world.backend.routes._stock_paths = None  # look at every step
                assert_same(world.graphs.replay(handed), world.run_stock())
        assert routes(world) == {"packed": 2, "stock": 2}

    def test_steady_steps_are_not_looked_at(self, routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
        world = routed(ALWAYS_STOCK, 4)
        looks = []
        host_lens = world.executor.host_lens
        monkeypatch.setattr(world.executor, "host_lens", lambda *args: looks.append(1) or host_lens(*args))
        for _ in range(2 * STEPS_WITHOUT_A_LOOK):
            world.graphs.replay()
        assert len(looks) == 2
        assert routes(world)["stock"] == 2 * STEPS_WITHOUT_A_LOOK

    @pytest.mark.parametrize(
        "handed", [NOTHING, Handed(fallback_reasons.BEAM_ROWS), Handed(fallback_reasons.NO_RADIX_CACHE)]
    )
    def test_steps_without_paths_replay_the_stock_graph(self, routed: Routed, handed: Handed) -> None:
        world = routed(ALWAYS_PACKED, 8)
        assert_same(world.graphs.replay(handed), world.run_stock())
        assert world.fallbacks == {handed.step: 1}
        assert world.stock.graph_calls[-1] == "replay"
        assert_same(world.graphs.replay(), world.run_stock())
        assert routes(world) == {"packed": 1, "stock": 0}

    def test_a_plan_that_does_not_fit_is_a_step_of_the_stock_graph(
        self, routed: Routed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = routed(ALWAYS_PACKED, 4)

        def too_large(*args: Any) -> None:
            raise PlanTooLarge("the plan needs 9 items; the buffers hold 8")

        monkeypatch.setattr(world.device_step, "load", too_large)
        assert_same(world.graphs.replay(), world.run_stock())
        assert world.fallbacks == {fallback_reasons.PLAN_TOO_LARGE: 1}
        assert world.stock.graph_calls[-1] == "replay"

    def test_eager_steps_are_routed_too(self, routed: Routed) -> None:
        world = routed(ALWAYS_STOCK)
        assert_same(world.run(), world.run_stock())
        assert world.stock.metadata_calls == 1
        assert world.stock.layer_calls == LAYERS
        assert routes(world) == {"packed": 0, "stock": 1}

    def test_graphs_of_other_modes_keep_their_keys(self, routed: Routed) -> None:
        world = routed(ALWAYS_STOCK, 4)
        world.graphs.replay()
        view = SimpleNamespace(**vars(world.batch))
        view.forward_mode = ForwardMode.TARGET_VERIFY
        world.backend.init_forward_metadata_out_graph(view)
        assert world.graphs._key(4) == ShapeKey(4)

    def test_prefill_is_not_routed(self, tmp_path: Path) -> None:
        path = write_profile(tmp_path, **ALWAYS_STOCK, kernels="native", backend="fa3")
        settings = Settings(metrics=False, route_profile=path, pack_extend=True)
        world = GpuWorld(SHARED, LENGTHS, [4, 1, 5, 9], settings=settings, stock_backend="fa3")
        assert_same(world.run(), world.run_stock())
        assert world.runtime.counters.steps_packed["extend"] == 1
        assert routes(world) == {"packed": 0, "stock": 0}


@pytest.mark.skipif(not hasattr(base_attn_backend, "SharedReadEnds"), reason="SGLang 0.5.18 and later ask")
class TestFence:
    """The scheduler may change its tables for the next step as soon as a step's reads of them are over."""

    def test_packed_graphs_alone_read_copies(self) -> None:
        world = GpuWorld(SHARED, LENGTHS, graphs=4)
        world.graphs.capture(4)
        assert world.backend.shared_read_ends(ForwardMode.DECODE) is base_attn_backend.SharedReadEnds.PRE_REPLAY

    def test_with_graphs_for_either_route_the_later_end_holds(self, routed: Routed) -> None:
        world = routed(BORDER, 4)
        stock = world.stock.shared_read_ends(ForwardMode.DECODE)
        assert stock is base_attn_backend.SharedReadEnds.IN_REPLAY
        assert world.backend.shared_read_ends(ForwardMode.DECODE) is stock


def test_state_tells_how_steps_are_routed(routed: Routed) -> None:
    world = routed(BORDER, 4)
    world.graphs.replay()
    state = process_state(world.runtime)["route"]
    assert state == {
        "setting": "auto",
        "profile": "made by hand, commit none",
        "last": {"route": "stock", "packed_us": 27.0, "stock_us": 26.4},
        "graph_sizes": [4],
    }
