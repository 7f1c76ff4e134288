"""Packed steps on CUDA, without a GPU: what is captured, loaded and prepared when, and that the numbers are right."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.step_buffers import PlanTooLarge
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import backend, eligibility
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import STOCK
from sgl_prefix_attn.sglang_plugin.execution import cuda_executor, kernel_set
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import LAYERS
from tests.sglang_plugin.gpu_fixture import DecodeGraphs, GpuFixture, host_kernels

# Long enough that reading the prefix once pays on a GPU.
SHARED = [[(1, 0, 2000), (2, 2000, 2600)], [(1, 0, 2000), (2, 2000, 2600)], [(1, 0, 2000)], []]
LENGTHS = [2640, 2605, 2005, 9]


def decode(**options: Any) -> GpuFixture:
    return GpuFixture(SHARED, LENGTHS, **options)


def graphs(*sizes: int, **options: Any) -> GpuFixture:
    fixture = decode(graphs=max(sizes), **options)
    for size in sorted(sizes, reverse=True):
        fixture.graphs.capture(size)
    return fixture


def out_of_memory(fixture: GpuFixture) -> None:
    def make_step(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fixture.executor._kernels = host_kernels(make_step)


def extend(**options: Any) -> GpuFixture:
    return GpuFixture(SHARED, LENGTHS, [4, 1, 5, 9], **options)


def assert_same(packed: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    for ours, theirs in zip(packed, stock, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


class TestEagerSteps:
    def test_decode_runs_packed(self) -> None:
        fixture = decode()
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {}
        assert fixture.stock.metadata_calls == fixture.stock.layer_calls == 0
        assert (len(fixture.device_step.loads), fixture.device_step.prepared) == (1, 1)
        assert fixture.device_step.attended == LAYERS
        assert fixture.state.counters.kv_tokens_read < fixture.state.counters.kv_tokens_per_request

    def test_extend_stays_with_the_stock_backend(self) -> None:
        fixture = extend()
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.COMPUTE_BOUND: 1}
        assert fixture.stock.metadata_calls == 1
        assert fixture.stock.layer_calls == LAYERS
        never_packed = fixture.handover._tracker.never_packed
        assert [never_packed(mode) for mode in ("decode", "extend", "mixed")] == [
            None,
            *[fallback_reasons.COMPUTE_BOUND] * 2,
        ]

    def test_extend_runs_packed_if_asked_for(self) -> None:
        fixture = extend(settings=Settings(metrics=False, pack_extend=True))
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {}
        assert fixture.state.counters.steps_packed["extend"] == 1

    def test_rows_that_a_prefill_graph_pads_come_out_as_zeros(self) -> None:
        fixture = extend(settings=Settings(metrics=False, pack_extend=True))
        layer = fixture.layers[0]
        q, k, v = fixture.qkv(layer)
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            out = fixture.backend.forward(torch.cat([q, q[:3]]), k, v, layer, fixture.batch)
        assert_same([out[: len(q)]], fixture.run_stock()[:1])
        assert not out[len(q) :].any()
        assert fixture.fallbacks == {}

    def test_a_plan_is_loaded_once_and_prepared_every_step(self) -> None:
        fixture = decode()
        for _ in range(STEPS_BETWEEN_PLANS + 3):
            assert_same(fixture.run(), fixture.run_stock())
            fixture.grow(1)
        assert len(fixture.device_step.loads) == 1
        assert fixture.device_step.prepared == STEPS_BETWEEN_PLANS + 3

    def test_tails_never_outgrow_their_room_before_a_new_plan_is_loaded(self) -> None:
        fixture = decode(settings=Settings(metrics=False, replan_growth=5))
        for _ in range(40):
            fixture.run()  # HostStep refuses a tail beyond what the plan was loaded with
            fixture.grow(1)
        assert len(fixture.device_step.loads) > 1

    def test_without_memory_for_buffers_the_server_goes_on_with_the_stock_backend(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        fixture = decode()
        out_of_memory(fixture)
        for _ in range(2):
            assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.NO_MEMORY: 2}
        assert caplog.text.count("no memory for the buffers") == 1

    def test_steps_that_other_backends_ran_meanwhile_are_noticed(self) -> None:
        fixture = decode(room=256)
        fixture.run()
        for tokens in (100, 2, 0):  # one is what a step of ours adds
            fixture.grow(tokens)
            assert_same(
                fixture.run(), fixture.run_stock()
            )  # HostStep refuses a tail beyond what the plan was loaded with
            assert fixture.backend.decision.step is not None
            assert fixture.backend.decision.step.age == 0
        fixture.grow(1)
        fixture.run()
        assert fixture.backend.decision.step.age == 1

    def test_a_step_in_place_of_its_lengths_keeps_those_it_was_planned_for(self) -> None:
        fixture = decode()
        fixture.run()
        step = fixture.backend.decision.step
        assert step is not None
        planned = step.host_lens.copy()
        fixture.batch.seq_lens_cpu += 1  # as SGLang does with the static lengths of its graphs
        assert step.host_lens.tolist() == planned.tolist()

    def test_a_plan_that_does_not_fit_goes_to_the_stock_backend(self, caplog: pytest.LogCaptureFixture) -> None:
        fixture = decode()
        fixture.run()
        fixture.grow(1)
        fixture.backend.decision = STOCK
        fixture.executor._shapes[0].loaded = None
        fixture.device_step.limits = SimpleNamespace(queries=64, items=64, kv_slots=100, partial_slots=64)
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.PLAN_TOO_LARGE: 1}
        assert "kv_slots; the buffers hold 100" in caplog.text
        assert fixture.stock.layer_calls == LAYERS

    def test_other_lengths_than_announced_are_another_batch(self) -> None:
        fixture = decode()
        lens = fixture.batch.seq_lens_cpu.clone()
        lens[1] += 1
        assert_same(fixture.run(Handed(fixture.step, fixture.batch.req_pool_indices, lens)), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.ROW_MISMATCH: 1}

    def test_rows_beyond_the_announced_ones_are_not_ours(self) -> None:
        fixture = decode()
        step = StepPaths(PrefixForest.from_paths([[], []]), "decode", 2, 2)
        fixture.run(Handed(step, fixture.batch.req_pool_indices[:2], fixture.batch.seq_lens_cpu[:2]))
        assert fixture.fallbacks == {fallback_reasons.ROW_MISMATCH: 1}

    def test_no_tensor_of_the_device_is_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = decode()
        fixture.run()
        fixture.grow(1)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("this waits for the device")

        for name in ("item", "tolist", "cpu", "equal", "__bool__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        monkeypatch.setattr(torch, "equal", refuse)
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
        fixture.backend.decision = STOCK
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
        monkeypatch.undo()
        assert fixture.fallbacks == {}
        assert fixture.device_step.prepared == 3


class TestDecodeGraphs:
    def test_a_replay_gives_the_numbers_of_the_batch(self) -> None:
        fixture = graphs(4)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.fallbacks == {}
        assert fixture.state.counters.steps_packed["decode"] == 1

    def test_a_graph_without_fallbacks_costs_the_stock_backend_nothing(self) -> None:
        fixture = graphs(4, 8)
        fixture.graphs.replay()
        assert fixture.stock.graph_calls == ["state 8"]
        assert fixture.stock.layer_calls == 0

    def test_what_a_graph_holds_is_the_layers_only(self) -> None:
        fixture = graphs(4)
        step = fixture.device_step
        before = (len(step.loads), step.prepared, step.attended)
        for launch in fixture.graphs.graph(4)[0]:
            launch()
        assert (len(step.loads), step.prepared, step.attended) == (*before[:2], before[2] + LAYERS)

    @pytest.mark.parametrize("size", [5, 8])
    def test_padded_rows_are_in_no_plan_and_stay_finite(self, size: int) -> None:
        fixture = graphs(size)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.device_step.loads[-1].num_requests == 4
        assert all(output.isfinite().all() for output in fixture.graphs.graph(size)[1])

    def test_a_smaller_batch_in_the_same_graph(self) -> None:
        fixture = graphs(4)
        fixture.graphs.replay()
        fewer = GpuFixture(SHARED[:2], LENGTHS[:2])
        two = SimpleNamespace(**vars(fixture.batch))
        two.batch_size = 2
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            setattr(two, name, getattr(fixture.batch, name)[:2])
        out = fixture.graphs.replay(Handed(fewer.step, two.req_pool_indices, two.seq_lens_cpu), two)
        assert_same(out, [rows[:2] for rows in fixture.run_stock()])
        assert fixture.device_step.loads[-1].num_requests == 2

    def test_growing_tails_keep_the_plan(self) -> None:
        fixture = graphs(4)
        for _ in range(2 * STEPS_BETWEEN_PLANS):
            assert_same(fixture.graphs.replay(), fixture.run_stock())
            fixture.grow(1)
        assert len(fixture.device_step.loads) == 2  # the capture's and the batch's
        assert fixture.fallbacks == {}

    def test_changed_membership_brings_a_new_plan(self) -> None:
        fixture = graphs(4)
        fixture.graphs.replay()
        step = StepPaths(PrefixForest.from_paths([[(1, 0, 2000)]] * 2 + [[], []]), "decode", 4, 4)
        out = fixture.graphs.replay(Handed(step, fixture.batch.req_pool_indices, fixture.batch.seq_lens_cpu))
        assert_same(out, fixture.run_stock())
        assert len(fixture.device_step.loads) == 3

    @pytest.mark.parametrize(
        "handed",
        [
            NOTHING,
            Handed(fallback_reasons.BEAM_ROWS),
            Handed(fallback_reasons.MODE),
            Handed(fallback_reasons.NO_RADIX_CACHE),
        ],
    )
    def test_without_paths_requests_are_read_one_by_one(self, handed: Handed) -> None:
        fixture = graphs(8)
        assert_same(fixture.graphs.replay(handed), fixture.run_stock())
        assert fixture.fallbacks == {handed.step: 1}
        assert not fixture.state.counters.steps_packed["decode"]
        assert fixture.device_step.loads[-1].kv_tokens_packed == sum(LENGTHS)
        assert fixture.stock.graph_calls == ["state 8"]

    def test_steps_with_and_without_paths_take_turns(self) -> None:
        fixture = graphs(4)
        for _ in range(3):
            assert_same(fixture.graphs.replay(), fixture.run_stock())
            assert_same(fixture.graphs.replay(NOTHING), fixture.run_stock())
            fixture.grow(1)

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
        assert fixture.fallbacks == {fallback_reasons.PLAN_TOO_LARGE: 1}

    def test_without_memory_for_buffers_graphs_hold_the_stock_backend(self) -> None:
        fixture = decode()
        out_of_memory(fixture)
        fixture.graphs = DecodeGraphs(fixture, 4)
        fixture.graphs.capture(4)
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        assert fixture.stock.graph_calls[-1] == "replay"
        assert list(fixture.fallbacks) == [fallback_reasons.NO_MEMORY]

    def test_ranks_that_capture_in_step_do_not_start_where_one_has_no_memory_for_buffers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixture = decode()
        out_of_memory(fixture)
        monkeypatch.setattr(backend, "several_ranks", lambda: True)
        with pytest.raises(RuntimeError, match="--mem-fraction-static"):
            DecodeGraphs(fixture, 4)

    def test_reading_one_by_one_never_leaves_more_to_merge_than_the_kernels_can(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixture = decode(graphs=4, settings=Settings(metrics=False, workers=64))
        lens = fixture.batch.seq_lens_cpu.numpy()
        assert any(plan.num_slots for plan in fixture.executor.unshared(lens)), "long requests are split"
        monkeypatch.setattr(cuda_executor, "unmergeable", lambda plan: "too many" if plan.num_slots else None)
        assert not any(plan.num_slots for plan in fixture.executor.unshared(lens))

    def test_reading_one_by_one_fits_whatever_the_limits_of_split_plans(self) -> None:
        fixture = decode(graphs=4)
        limits = fixture.device_step.limits
        fixture.device_step.limits = SimpleNamespace(queries=limits.queries, items=4, kv_slots=limits.kv_slots,
                                                   partial_slots=0)  # fmt: skip
        fixture.graphs.capture(4)
        assert_same(fixture.graphs.replay(NOTHING), fixture.run_stock())
        assert fixture.device_step.loads[-1].num_slots == 0

    def test_buffers_hold_the_largest_graph_at_full_context(self) -> None:
        fixture = decode(graphs=4)
        context = fixture.rows.req_to_token.shape[1]
        assert fixture.device_step.limits.kv_slots >= 4 * (context + fixture.state.settings.replan_growth)
        assert fixture.device_step.limits.queries >= fixture.rows.req_to_token.shape[0]

    def test_an_idle_rank_replays_padding_only(self) -> None:
        fixture = graphs(4)
        idle = SimpleNamespace(**vars(fixture.batch))
        idle.batch_size, idle.forward_mode = 0, ForwardMode.IDLE
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            setattr(idle, name, getattr(fixture.batch, name)[:0])
        fixture.graphs.replay(NOTHING, idle, size=4)
        assert fixture.device_step.prepared > 1
        assert all(output.isfinite().all() for output in fixture.graphs.graph(4)[1])

    def test_a_batch_without_lengths_on_the_host_is_still_right(self) -> None:
        fixture = graphs(4)
        fixture.batch.seq_lens_cpu = None
        assert_same(fixture.graphs.replay(Handed(fallback_reasons.NO_HOST_LENGTHS)), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.NO_HOST_LENGTHS: 1}

    def test_prefill_between_two_replays(self) -> None:
        fixture = graphs(4)
        fixture.graphs.replay()
        mode, fixture.batch.forward_mode = fixture.batch.forward_mode, ForwardMode.EXTEND
        with fixture.handover.handed_over(NOTHING):
            fixture.backend.init_forward_metadata(fixture.batch)
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

    def test_decode_switched_off(self) -> None:
        fixture = decode(graphs=4, settings=Settings(metrics=False, pack_decode=False))
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


class TestAdmission:
    @pytest.fixture(autouse=True)
    def _kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eligibility, "choose_kernels", lambda setting, device: host_kernels())

    def executor(self, **arguments: Any) -> Any:
        runner = decode().runner
        runner.device = "cuda"
        vars(runner.server_args).update(arguments)
        return eligibility.make_executor(runner, Settings())

    def test_a_plain_server_packs(self) -> None:
        assert isinstance(self.executor(), CudaExecutor)

    @pytest.mark.parametrize(
        ("argument", "reason"),
        [
            ("disable_radix_cache", fallback_reasons.NO_RADIX_CACHE),
            ("enable_two_batch_overlap", fallback_reasons.TWO_BATCH_OVERLAP),
            ("enable_pdmux", fallback_reasons.PDMUX),
        ],
    )
    def test_servers_whose_graphs_are_stock(self, argument: str, reason: str) -> None:
        assert self.executor(**{argument: True}) == reason

    def test_a_server_with_drafts_has_stock_graphs(self) -> None:
        runner = decode().runner
        runner.device, runner.spec_algorithm = "cuda", SpeculativeAlgorithm.EAGLE
        assert eligibility.make_executor(runner, Settings()) == fallback_reasons.SPECULATIVE

    def test_plans_are_not_left_to_a_graph_of_the_work_before_a_replay(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from sglang.srt.environ import envs

        switch = envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH
        self.executor()
        assert versions.GLUE_VARIABLE not in os.environ
        monkeypatch.setenv(versions.GLUE_VARIABLE, "1")
        assert self.executor(disable_radix_cache=True) == fallback_reasons.NO_RADIX_CACHE
        assert switch.get(), "nothing of ours is in the graphs of a server that never packs"
        self.executor()
        assert not switch.get()
        assert f"{versions.GLUE_VARIABLE} is switched off" in caplog.text

    def test_layers_the_gpu_kernels_do_not_know(self) -> None:
        fixture = decode(head_dim=32)
        fixture.backend._layers.scan_model()
        assert fixture.backend._layers.unsupported_reasons() == {fallback_reasons.HEAD_DIM}
        fixture = decode(kv_dtype=torch.float32)
        fixture.backend._layers.scan_model()
        assert fixture.backend._layers.unsupported_reasons() == {fallback_reasons.KV_DTYPE}

    @pytest.mark.parametrize(("head_dim", "widest"), [(64, 128), (256, 64)])
    def test_plans_have_the_tiles_that_the_kernels_have_for_the_head_size(self, head_dim: int, widest: int) -> None:
        fixture = decode(head_dim=head_dim)
        fixture.backend._layers.scan_model()
        assert [planner.device.tile_rows[-1] for planner in fixture.executor.planners] == [widest]

    def test_a_model_of_such_layers_only_has_stock_graphs(self) -> None:
        fixture = decode(head_dim=32, graphs=4)
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata_out_graph(fixture.batch, in_capture=True)
        assert fixture.stock.graph_calls == ["state 4", "capture"]

    def test_a_query_of_another_type_than_the_cache(self) -> None:
        fixture = decode()
        layer = fixture.layers[0]
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            fixture.backend.forward(*fixture.qkv(layer, torch.float32), layer, fixture.batch)
        assert fixture.fallbacks == {fallback_reasons.QUERY_DTYPE: 1}

    def test_a_shape_that_shows_up_late(self) -> None:
        fixture = graphs(4)
        late = SimpleNamespace(**vars(fixture.layers[0]))
        late.tp_q_head_num = 8
        assert fixture.backend._layers.facts(late).unsupported_reason == fallback_reasons.LATE_LAYER


class TestKernels:
    GPU = torch.device("cuda")

    @pytest.fixture
    def h200(self, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
        monkeypatch.setattr(kernel_set._native, "built_with_cuda", True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return monkeypatch

    def test_native_where_they_run(self, h200: pytest.MonkeyPatch) -> None:
        assert choose("auto").name == choose("native").name == "native"
        assert choose("triton").name == "triton"

    def test_triton_for_an_old_gpu(self, h200: pytest.MonkeyPatch) -> None:
        h200.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert choose("auto").name == "triton"
        assert "the GPU has 7.5" in kernel_set.choose_kernels("native", self.GPU)

    def test_triton_for_a_build_without_nvcc(self, h200: pytest.MonkeyPatch) -> None:
        h200.setattr(kernel_set._native, "built_with_cuda", False)
        assert choose("auto").name == "triton"
        assert "built without CUDA" in kernel_set.choose_kernels("native", self.GPU)

    def test_none_without_triton_either(self, h200: pytest.MonkeyPatch) -> None:
        h200.setattr(kernel_set._native, "built_with_cuda", False)
        h200.setattr(kernel_set, "triton_kernels", lambda: (_ for _ in ()).throw(ImportError("no triton")))
        assert "no triton" in kernel_set.choose_kernels("auto", self.GPU)

    def test_none_for_other_devices(self) -> None:
        assert kernel_set.choose_kernels("auto", torch.device("xpu")) == (
            "there are no packed kernels for the device xpu"
        )

    def test_rows_that_are_not_whole_words(self) -> None:
        cache = torch.zeros(8, 2, 65, dtype=torch.bfloat16)[:, :, :64]
        assert host_kernels().unsupported_reason(64, cache) == fallback_reasons.KV_LAYOUT
        assert host_kernels().unsupported_reason(64, cache.contiguous()) is None


def choose(setting: Any) -> Any:
    return kernel_set.choose_kernels(setting, TestKernels.GPU)
