"""Packed decode graphs without a GPU: what is captured, loaded and replayed, and that the numbers are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.core.step_buffers import PlanTooLarge
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import backend
from sgl_prefix_attn.sglang_plugin.execution import cuda_executor
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.gpu_fixture import (
    DecodeGraphs,
    GpuFixture,
    assert_same,
    decode,
    first_of,
    graphs,
    out_of_memory,
)


class TestDecodeGraphs:
    def test_a_graph_without_fallbacks_costs_the_stock_backend_nothing(self) -> None:
        fixture = graphs(4, 8)
        fixture.graphs.replay()
        assert fixture.stock.graph_calls == ["state 8"]
        assert fixture.stock.layer_calls == 0

    @pytest.mark.parametrize("size", [5, 8])
    def test_padded_rows_are_in_no_plan_and_stay_finite(self, size: int) -> None:
        fixture = graphs(size)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.device_step.loads[-1].num_requests == 4
        assert all(output.isfinite().all() for output in fixture.graphs.graph(size)[1])

    def test_a_smaller_batch_in_the_same_graph(self) -> None:
        fixture = graphs(4)
        fixture.graphs.replay()
        fewer = GpuFixture(fixture.paths[:2], fixture.seq_lens[:2])
        two = first_of(fixture.batch, 2)
        out = fixture.graphs.replay(Handed(fewer.step, two.req_pool_indices, two.seq_lens_cpu), two)
        assert_same(out, [rows[:2] for rows in fixture.run_stock()])
        assert fixture.device_step.loads[-1].num_requests == 2

    def test_buffers_of_an_eager_step_are_replaced_by_those_of_graphs(self) -> None:
        fixture = decode()
        fixture.run()
        fixture.graphs = DecodeGraphs(fixture, 8)
        fixture.graphs.capture(8)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert len(fixture.steps) == 2
        assert fixture.device_step.limits.queries >= 8

    def test_growing_tails_keep_the_plan(self) -> None:
        fixture = graphs(4)
        for _ in range(2 * STEPS_BETWEEN_PLANS):
            assert_same(fixture.graphs.replay(), fixture.run_stock())
            fixture.grow(1)
        assert len(fixture.device_step.loads) == 2  # the capture's and the batch's
        assert fixture.fallbacks == {}

    @pytest.mark.parametrize(
        "handed", [NOTHING, *map(Handed, (reasons.BEAM_ROWS, reasons.MODE, reasons.NO_RADIX_CACHE))]
    )
    def test_without_paths_requests_are_read_one_by_one(self, handed: Handed) -> None:
        fixture = graphs(8)
        assert_same(fixture.graphs.replay(handed), fixture.run_stock())
        assert fixture.fallbacks == {handed.paths: 1}
        assert not fixture.state.counters.steps_packed["decode"]
        assert fixture.device_step.loads[-1].kv_tokens_packed == sum(fixture.seq_lens)
        assert fixture.stock.graph_calls == ["state 8"]

    def test_a_plan_that_does_not_fit_is_replaced_by_reading_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = graphs(4)
        load = fixture.device_step.load
        packed = fixture.executor.planners[0]

        def too_large(plan: Any, *args: Any) -> None:
            if plan is packed.plan(fixture.step.forest, fixture.batch.seq_lens_cpu.numpy()):
                raise PlanTooLarge("the plan needs 9 items; the buffers hold 8")
            load(plan, *args)

        monkeypatch.setattr(fixture.device_step, "load", too_large)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.fallbacks == {reasons.PLAN_TOO_LARGE: 1}

    def test_without_memory_for_buffers_graphs_hold_the_stock_backend(self) -> None:
        fixture = decode()
        out_of_memory(fixture)
        fixture.graphs = DecodeGraphs(fixture, 4)
        fixture.graphs.capture(4)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.stock.graph_calls[-1] == "replay"
        assert list(fixture.fallbacks) == [reasons.NO_MEMORY]

    def test_ranks_that_capture_in_step_do_not_start_where_one_has_no_memory_for_buffers(self, monkeypatch):
        fixture = decode()
        out_of_memory(fixture)
        monkeypatch.setattr(backend, "several_ranks", lambda: True)
        with pytest.raises(RuntimeError, match="--mem-fraction-static"):
            DecodeGraphs(fixture, 4)

    def test_reading_one_by_one_never_leaves_more_to_combine_than_the_kernels_can(self, monkeypatch):
        fixture = decode(graphs=4, settings=Settings(metrics=False, workers=64))
        lens = fixture.batch.seq_lens_cpu.numpy()
        assert any(plan.num_partials for plan in fixture.executor.unshared(lens)), "long requests are split"
        monkeypatch.setattr(
            cuda_executor, "unsupported_combine", lambda plan: "too many" if plan.num_partials else None
        )
        assert not any(plan.num_partials for plan in fixture.executor.unshared(lens))

    def test_reading_one_by_one_fits_whatever_the_limits_of_split_plans(self) -> None:
        fixture = decode(graphs=4)
        limits = fixture.device_step.limits
        fixture.device_step.limits = SimpleNamespace(queries=limits.queries, items=4, kv_slots=limits.kv_slots,
                                                   partials=0)  # fmt: skip
        fixture.graphs.capture(4)
        assert_same(fixture.graphs.replay(NOTHING), fixture.run_stock())
        assert fixture.device_step.loads[-1].num_partials == 0

    def test_an_idle_rank_replays_padding_only(self) -> None:
        fixture = graphs(4)
        fixture.graphs.replay(NOTHING, first_of(fixture.batch, 0), size=4)
        assert fixture.device_step.prepared > 1
        assert all(output.isfinite().all() for output in fixture.graphs.graph(4)[1])

    def test_a_batch_without_lengths_on_the_host_is_still_right(self) -> None:
        fixture = graphs(4)
        fixture.batch.seq_lens_cpu = None
        assert_same(fixture.graphs.replay(Handed(reasons.NO_HOST_LENGTHS)), fixture.run_stock())
        assert fixture.fallbacks == {reasons.NO_HOST_LENGTHS: 1}

    def test_prefill_between_two_replays(self) -> None:
        fixture = graphs(4)
        fixture.graphs.replay()
        mode, fixture.batch.forward_mode = fixture.batch.forward_mode, ForwardMode.EXTEND
        fixture.prepare(NOTHING)
        assert fixture.stock.metadata_calls == 1
        fixture.batch.forward_mode = mode
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert len(fixture.device_step.loads) == 2

    def test_an_eager_step_between_two_replays(self) -> None:
        fixture = graphs(4)
        fixture.graphs.replay()
        assert_same(fixture.run(), fixture.run_stock())
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert len(fixture.device_step.loads) == 2


class TestGraphsWithStockLayers:
    """A layer that cannot run packed brings the stock backend's metadata into every graph step; nothing else does."""

    def test_a_layer_known_beforehand(self) -> None:
        fixture = decode()
        fixture.layers[1].attn_type = AttentionType.DECODER_BIDIRECTIONAL
        fixture.graphs = DecodeGraphs(fixture, 4)
        fixture.graphs.capture(4)
        warm_up = ["in graph", "warm"]
        assert fixture.stock.graph_calls == ["state 4", "capture", *warm_up, *warm_up, "in graph"]
        fixture.graphs.replay()
        assert fixture.stock.graph_calls[-1] == "replay"
        assert fixture.state.counters.steps_packed["decode"] == 1

    def test_an_argument_that_shows_up_at_the_first_call(self) -> None:
        fixture = decode(graphs=4)
        with pytest.raises(TypeError):  # torch_native does not know it either, but has its metadata by then
            fixture.graphs.capture(4, q_rope=torch.zeros(1))
        assert fixture.stock.graph_calls == ["state 4", "capture", "in graph"]
        fixture.graphs.capture(2)
        assert fixture.stock.graph_calls[3] == "capture"

    def test_verification_graphs_are_the_stock_backends(self) -> None:
        fixture = graphs(4)
        view = SimpleNamespace(**vars(fixture.batch))
        view.forward_mode = ForwardMode.TARGET_VERIFY
        fixture.backend.init_forward_metadata_out_graph(view, in_capture=True)
        fixture.backend.init_forward_metadata_in_graph(view)
        assert fixture.stock.graph_calls[1:] == ["capture", "in graph"]
        assert fixture.backend.decision.step is None

    @pytest.mark.parametrize("options", [{"settings": Settings(metrics=False, pack_decode=False)}, {"head_dim": 32}])
    def test_decode_switched_off_or_a_model_of_such_layers_only(self, options: dict[str, Any]) -> None:
        fixture = decode(graphs=4, **options)
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata_out_graph(fixture.batch, in_capture=True)
        assert fixture.stock.graph_calls == ["state 4", "capture"]
        assert fixture.steps == []


SharedReadEnds: Any = getattr(base_attn_backend, "SharedReadEnds", None)


@pytest.mark.skipif(SharedReadEnds is None, reason="SGLang asks from 0.5.18 on")
class TestFence:
    def ends(self, fixture: GpuFixture, mode: ForwardMode) -> Any:
        return fixture.backend.shared_read_ends(mode)

    def test_packed_graphs_read_the_schedulers_tables_before_the_replay(self) -> None:
        assert self.ends(graphs(4), ForwardMode.DECODE) is SharedReadEnds.PRE_REPLAY

    def test_a_layer_of_the_stock_backend_decides_for_all(self) -> None:
        fixture = graphs(4)
        fixture.backend._layers.has_stock_layers = True
        assert self.ends(fixture, ForwardMode.DECODE) is fixture.stock.shared_read_ends(ForwardMode.DECODE)

    def test_other_steps_are_the_stock_backends(self) -> None:
        fixture = graphs(4)
        for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
            assert self.ends(fixture, mode) is fixture.stock.shared_read_ends(mode)
