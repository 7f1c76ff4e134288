"""The backend: what runs packed gives torch_native's numbers, what cannot goes to the stock backend, counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import backend as backend_module
from sgl_prefix_attn.sglang_plugin.backend import runtime
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.delegation import delegated_members
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.attention_world import LAYERS, World

SHARED = [[(1, 0, 200), (2, 200, 260)], [(1, 0, 200), (2, 200, 260)], [(1, 0, 200)], []]
LENGTHS = [300, 265, 205, 9]
MODES: tuple[Mode, ...] = ("decode", "extend", "mixed")


@pytest.fixture(autouse=True)
def _one_runtime_per_test() -> Iterator[None]:
    yield
    runtime.stop()


def decode(**options: Any) -> World:
    return World(SHARED, LENGTHS, **options)


def extend(**options: Any) -> World:
    return World(SHARED, LENGTHS, [4, 1, 5, 9], **options)


def mixed(**options: Any) -> World:
    return World(SHARED, LENGTHS, [4, 1, 1, 1], num_decode=3, **options)


def assert_same(packed: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    for ours, theirs in zip(packed, stock, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("make", "mode"), [(decode, "decode"), (extend, "extend"), (mixed, "mixed")])
class TestPackedSteps:
    def test_numbers_are_torch_natives(self, make: Any, mode: str) -> None:
        world = make()
        assert_same(world.run(), world.run_stock())
        assert world.runtime.counters.steps_packed[mode] == 1
        assert world.fallbacks == {}
        assert world.stock.layer_calls == 0
        assert world.stock.metadata_calls == 0

    def test_keys_and_values_are_in_the_pool_before_they_are_read(self, make: Any, mode: str) -> None:
        world = make()
        world.run()
        for layer in world.layers:
            _, k, v = world.qkv(layer)
            slots = world.batch.out_cache_loc
            torch.testing.assert_close(world.pool.get_key_buffer(layer.layer_id)[slots], k)
            torch.testing.assert_close(world.pool.get_value_buffer(layer.layer_id)[slots], v)

    def test_kv_reads_are_counted(self, make: Any, mode: str) -> None:
        world = make()
        world.run()
        counters = world.runtime.counters
        assert counters.kv_tokens_unique <= counters.kv_tokens_read < counters.kv_tokens_per_request
        assert counters.plans_made == 1
        assert counters.host_seconds > 0

    def test_can_be_switched_off(self, make: Any, mode: str) -> None:
        world = make(settings=Settings(metrics=False, **{f"pack_{mode}": False}))
        assert_same(world.run(), world.run_stock())
        assert world.fallbacks == {fallback_reasons.DISABLED: 1}


def test_a_prefill_of_nothing_but_new_prompts_runs_packed_too() -> None:
    world = World([[], [], []], [40, 3, 17], [40, 3, 17])
    assert_same(world.run(), world.run_stock())
    assert world.fallbacks == {}


class TestAttentionVariants:
    def test_sliding_window(self) -> None:
        for make in (decode, extend, mixed):
            world = make()
            for layer in world.layers:
                layer.sliding_window_size = 7
            assert_same(world.run(), world.run_stock())
            assert world.fallbacks == {}

    def test_soft_cap_changes_the_result_and_runs_packed(self) -> None:
        world = decode()
        plain = world.run()
        for layer in world.layers:
            layer.logit_cap = 0.5
        assert world.backend._layers.obstacles() == {None}  # looked up per layer, but the cap is read per call
        capped = world.run()
        assert world.fallbacks == {}
        assert not torch.allclose(plain[0], capped[0], atol=1e-3)

    def test_sinks_take_part_in_the_denominator(self) -> None:
        world = decode()
        plain = world.run()
        with_sinks = world.run(sinks=torch.full((4,), 3.0, dtype=torch.bfloat16))
        assert world.fallbacks == {}
        assert (with_sinks[0].abs() < plain[0].abs()).all()

    def test_kv_in_half_precision(self) -> None:
        world = decode(kv_dtype=torch.bfloat16)
        for ours, theirs in zip(world.run(), world.run_stock(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        assert world.fallbacks == {}

    def test_a_layer_that_keeps_no_kv_of_its_own_reads_another_ones(self) -> None:
        world = decode()
        layer = world.layers[0]
        before = world.pool.get_key_buffer(0).clone()
        with world.handover.handed_over(world.handed):
            world.backend.init_forward_metadata(world.batch)
            q, _, _ = world.qkv(layer)
            world.backend.forward(q, None, None, layer, world.batch, save_kv_cache=False)
        assert torch.equal(world.pool.get_key_buffer(0), before)
        assert world.fallbacks == {}


class TestStepFallbacks:
    """The whole step goes to the stock backend, with metadata, once counted, with its numbers."""

    def falls_back(self, world: World, reason: str, handed: Handed | None = None) -> None:
        out = world.run(handed)
        assert world.fallbacks == {reason: 1}
        assert world.stock.metadata_calls == 1
        assert world.stock.layer_calls == LAYERS
        assert not any(world.runtime.counters.steps_packed.values())
        assert_same(out, world.run_stock())
        assert reason in fallback_reasons.EXPLANATIONS

    def test_no_paths(self) -> None:
        self.falls_back(decode(), fallback_reasons.NO_PATHS, NOTHING)

    @pytest.mark.parametrize(
        "reason", [fallback_reasons.BEAM_ROWS, fallback_reasons.NO_RADIX_CACHE, fallback_reasons.MODE]
    )
    def test_a_reason_instead_of_paths(self, reason: str) -> None:
        self.falls_back(decode(), reason, Handed(reason))

    def test_paths_that_could_not_be_read_are_counted_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = decode()
        monkeypatch.setattr(world.handover, "_tracker", None)
        self.falls_back(world, fallback_reasons.HOOK_FAILED, world.handover.read(world.batch))

    def test_other_rows_than_announced(self) -> None:
        world = decode()
        self.falls_back(world, fallback_reasons.ROW_MISMATCH, Handed(world.step, world.batch.req_pool_indices + 1))

    def test_another_number_of_rows(self) -> None:
        world = decode()
        other = StepPaths(PrefixForest.from_paths([[]]), "decode", 1, 1)
        self.falls_back(world, fallback_reasons.ROW_MISMATCH, Handed(other, world.batch.req_pool_indices[:1]))

    def test_another_kind_of_step(self) -> None:
        world = decode()
        lengths = np.array([1, 1, 1, 1])
        other = StepPaths(world.step.forest, "extend", 4, 0, lengths)
        self.falls_back(world, fallback_reasons.ROW_MISMATCH, Handed(other, world.batch.req_pool_indices))

    def test_speculative_input(self) -> None:
        world = decode()
        world.batch.spec_info = SimpleNamespace()
        self.falls_back(world, fallback_reasons.SPECULATIVE)

    def test_half_of_a_two_batch_overlap(self) -> None:
        world = decode()
        world.batch.tbo_parent_token_range = (0, 4)
        self.falls_back(world, fallback_reasons.TWO_BATCH_OVERLAP)

    def test_draft_worker(self) -> None:
        self.falls_back(decode(is_draft_worker=True), fallback_reasons.DRAFT_WORKER)

    def test_no_paths_are_read_for_a_runner_that_never_packs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "has_sliding_window_pool", lambda pool: True)
        tracker = decode().handover._tracker
        assert {tracker.never_packed(mode) for mode in MODES} == {fallback_reasons.HYBRID_SWA}

    def test_what_a_draft_model_packs_does_not_keep_paths_from_being_read(self) -> None:
        tracker = decode(is_draft_worker=True).handover._tracker
        assert {tracker.never_packed(mode) for mode in MODES} == {None}

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_decode_context_parallelism(self, device: str) -> None:
        world = decode(device=device, server_args=SimpleNamespace(dcp_size=2))
        self.falls_back(world, fallback_reasons.DECODE_CONTEXT_PARALLEL)

    def test_no_kernel_for_the_device(self) -> None:
        settings = Settings(metrics=False, gpu_kernels="native")
        self.falls_back(decode(device="cuda", settings=settings), fallback_reasons.NO_CUDA_KERNEL)

    def test_paths_and_lengths_that_contradict_each_other(self, caplog: pytest.LogCaptureFixture) -> None:
        world = decode()
        # The forest says that the first two requests share 260 positions, but one of them has only 10.
        world.batch.seq_lens = torch.tensor([300, 10, 205, 9])
        with caplog.at_level(logging.ERROR):
            self.falls_back(world, fallback_reasons.PLAN_REFUSED)
        assert "Traceback" in caplog.text

    def test_encoder_decoder(self) -> None:
        world = decode(model_config=SimpleNamespace(is_encoder_decoder=True))
        world.run()
        assert world.fallbacks == {fallback_reasons.ENCODER_DECODER: 1}

    def test_hybrid_sliding_window_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "has_sliding_window_pool", lambda pool: True)
        self.falls_back(decode(), fallback_reasons.HYBRID_SWA)

    def test_idle(self) -> None:
        world = decode()
        world.batch.forward_mode = ForwardMode.IDLE
        with world.handover.handed_over(world.handed):
            world.backend.init_forward_metadata(world.batch)
            layer = world.layers[0]
            out = world.backend.forward(torch.empty(0, 128), None, None, layer, world.batch)
        assert out.shape == (0, 128)
        assert world.fallbacks == {fallback_reasons.IDLE: 1}

    def test_graph_capture_and_replay(self) -> None:
        world = decode()
        with world.handover.handed_over(world.handed):
            world.backend.init_forward_metadata_out_graph(world.batch, in_capture=True)
        assert world.fallbacks == {fallback_reasons.GRAPH: 1}

    def test_a_step_after_a_fallback_runs_packed_again(self) -> None:
        world = decode()
        world.run(NOTHING)
        assert_same(world.run(), world.run_stock())
        assert world.runtime.counters.steps_packed["decode"] == 1

    def test_a_packed_step_leaves_nothing_for_a_step_without_paths(self) -> None:
        world = decode()
        world.run()
        world.run(NOTHING)
        assert world.stock.layer_calls == LAYERS

    def test_the_first_of_each_reason_is_explained_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        world = decode()
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                world.run(NOTHING)
        assert caplog.text.count(fallback_reasons.EXPLANATIONS[fallback_reasons.NO_PATHS]) == 1
        assert world.fallbacks == {fallback_reasons.NO_PATHS: 3}


class TestLayerFallbacks:
    """One layer goes to the stock backend, whose metadata is there when it is needed; the others run packed."""

    def one_layer(self, change: dict[str, Any], reason: str, *, stock: bool = True) -> None:
        world = decode()
        for name, value in change.items():
            setattr(world.layers[1], name, value)
        out = world.run()
        assert world.fallbacks == {reason: 1}
        assert world.stock.metadata_calls == 1
        assert world.stock.layer_calls == 1
        assert world.runtime.counters.steps_packed["decode"] == 1
        if stock:
            assert_same(out, world.run_stock())

    def test_encoder_only(self) -> None:
        self.one_layer({"attn_type": AttentionType.ENCODER_ONLY}, fallback_reasons.NON_CAUSAL)

    def test_bidirectional(self) -> None:
        self.one_layer({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, fallback_reasons.NON_CAUSAL)

    def test_capping_other_than_tanh(self) -> None:
        self.one_layer({"logit_cap": 5.0, "logit_capping_method": "sigmoid"}, fallback_reasons.LAYER_VARIANT)

    def test_length_dependent_temperature(self) -> None:
        self.one_layer({"xai_temperature_len": 1024}, fallback_reasons.LAYER_VARIANT)

    def test_chunked_local_attention(self) -> None:
        self.one_layer({"use_irope": True}, fallback_reasons.LAYER_VARIANT)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"is_cross_attention": True}, fallback_reasons.CROSS_ATTENTION),
            ({"v_head_dim": 16}, fallback_reasons.HEAD_DIM),
            ({"qk_head_dim": 40, "v_head_dim": 40}, fallback_reasons.HEAD_DIM),
            ({"qk_head_dim": 512, "v_head_dim": 512}, fallback_reasons.HEAD_DIM),
            ({"tp_q_head_num": 3}, fallback_reasons.HEAD_GROUPS),
            ({"qk_head_dim": 64, "v_head_dim": 64}, fallback_reasons.KV_LAYOUT),
        ],
    )
    def test_shapes_the_packed_path_does_not_know(self, change: dict[str, Any], reason: str) -> None:
        world = decode()
        for name, value in change.items():
            setattr(world.layers[1], name, value)
        assert world.backend._layers.facts(world.layers[1]).obstacle == reason
        assert reason in fallback_reasons.EXPLANATIONS

    def test_a_kv_cache_in_a_type_the_packed_path_does_not_know(self) -> None:
        world = decode(kv_dtype=torch.float8_e5m2)
        world.backend._layers.look_at_model()
        assert world.backend._layers.obstacles() == {fallback_reasons.KV_DTYPE}

    def test_an_argument_nobody_knows(self) -> None:
        world = decode()
        layer = world.layers[0]
        with world.handover.handed_over(world.handed):
            world.backend.init_forward_metadata(world.batch)
            with pytest.raises(TypeError):  # torch_native does not know it either
                world.backend.forward(*world.qkv(layer), layer, world.batch, q_rope=torch.zeros(1))
        assert world.fallbacks == {fallback_reasons.CALL_ARGUMENTS: 1}

    def test_padded_queries(self) -> None:
        world = decode()
        layer = world.layers[0]
        q, _, _ = world.qkv(layer)
        with world.handover.handed_over(world.handed):
            world.backend.init_forward_metadata(world.batch)
            reason = backend_module._call_obstacle(world.backend._step, torch.cat([q, q]), layer, {})
        assert reason == fallback_reasons.ROW_MISMATCH

    def test_the_next_step_prepares_the_stock_backend_beforehand(self) -> None:
        world = decode()
        world.layers[1].attn_type = AttentionType.ENCODER_ONLY
        world.run()
        with world.handover.handed_over(world.handed):
            world.backend.init_forward_metadata(world.batch)
        assert world.stock.metadata_calls == 2


class TestPlanReuse:
    def test_steady_decode_plans_once(self) -> None:
        world = decode()
        for _ in range(10):
            world.run()
        assert (world.runtime.counters.plans_made, world.runtime.counters.plans_reused) == (1, 9)

    def test_growing_tails_keep_the_numbers_right(self) -> None:
        world = decode()
        world.run()
        for extra in range(1, 4):
            for row, length in enumerate(world.seq_lens, 1):
                world.rows.req_to_token[row, length + extra - 1] = extra
            world.batch.seq_lens = torch.tensor(world.seq_lens) + extra
            world.batch.out_cache_loc = torch.full((4,), extra)
            assert_same(world.run(), world.run_stock())
        assert world.runtime.counters.plans_made == 1


class TestDelegation:
    def test_no_member_of_the_base_class_answers_with_its_default(self) -> None:
        own = {name for name in vars(PrefixPackBackend) if not name.startswith("__")}
        for name in delegated_members(AttentionBackend, type("Empty", (), {})):
            assert name in own, f"AttentionBackend.{name} would bypass the stock backend"

    def test_methods_properties_and_attributes_are_the_stock_ones(self) -> None:
        world = decode()
        assert world.backend.support_triton() is False  # torch_native's answer; the base class says True
        world.stock.extend_dummy_seqs_capped_by_req_pool = True
        assert world.backend.extend_dummy_seqs_capped_by_req_pool is True
        world.backend.forward_metadata = "written through"
        assert world.stock.forward_metadata == "written through"

    def test_what_only_the_stock_backend_has_is_found(self) -> None:
        world = decode()
        world.stock.workspace_of_its_own = 5
        assert world.backend.workspace_of_its_own == 5
        assert not hasattr(world.backend, "nobody_has_this")

    def test_lengths_on_the_host_are_asked_for_whatever_the_stock_backend_needs(self) -> None:
        world = decode()
        world.stock.needs_cpu_seq_lens = False
        assert world.backend.needs_cpu_seq_lens is True
