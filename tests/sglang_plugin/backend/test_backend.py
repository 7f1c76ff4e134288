"""The backend: what runs packed gives torch_native's numbers, what cannot goes to the stock backend, counted."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.delegation import delegated_members
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import LAYERS, Fixture

SHARED = [[(1, 0, 200), (2, 200, 260)], [(1, 0, 200), (2, 200, 260)], [(1, 0, 200)], []]
LENGTHS = [300, 265, 205, 9]
MODES: tuple[Mode, ...] = ("decode", "extend", "mixed")


def decode(**options: Any) -> Fixture:
    return Fixture(SHARED, LENGTHS, **options)


def extend(**options: Any) -> Fixture:
    return Fixture(SHARED, LENGTHS, [4, 1, 5, 9], **options)


def mixed(**options: Any) -> Fixture:
    return Fixture(SHARED, LENGTHS, [4, 1, 1, 1], num_decode=3, **options)


def assert_same(packed: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    for ours, theirs in zip(packed, stock, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("make", "mode"), [(decode, "decode"), (extend, "extend"), (mixed, "mixed")])
class TestPackedSteps:
    def test_numbers_are_torch_natives(self, make: Any, mode: str) -> None:
        fixture = make()
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.state.counters.steps_packed[mode] == 1
        assert fixture.fallbacks == {}
        assert fixture.stock.layer_calls == 0
        assert fixture.stock.metadata_calls == 0

    def test_keys_and_values_are_in_the_pool_before_they_are_read(self, make: Any, mode: str) -> None:
        fixture = make()
        fixture.run()
        for layer in fixture.layers:
            _, k, v = fixture.qkv(layer)
            slots = fixture.batch.out_cache_loc
            torch.testing.assert_close(fixture.pool.get_key_buffer(layer.layer_id)[slots], k)
            torch.testing.assert_close(fixture.pool.get_value_buffer(layer.layer_id)[slots], v)

    def test_kv_reads_are_counted(self, make: Any, mode: str) -> None:
        fixture = make()
        fixture.run()
        counters = fixture.state.counters
        assert counters.kv_tokens_unique <= counters.kv_tokens_read < counters.kv_tokens_per_request
        assert counters.plans_made == 1
        assert counters.host_seconds > 0

    def test_can_be_switched_off(self, make: Any, mode: str) -> None:
        fixture = make(settings=Settings(metrics=False, **{f"pack_{mode}": False}))
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.DISABLED: 1}


def test_a_prefill_of_nothing_but_new_prompts_runs_packed_too() -> None:
    fixture = Fixture([[], [], []], [40, 3, 17], [40, 3, 17])
    assert_same(fixture.run(), fixture.run_stock())
    assert fixture.fallbacks == {}


class TestAttentionVariants:
    def test_sliding_window(self) -> None:
        for make in (decode, extend, mixed):
            fixture = make()
            for layer in fixture.layers:
                layer.sliding_window_size = 7
            assert_same(fixture.run(), fixture.run_stock())
            assert fixture.fallbacks == {}

    def test_soft_cap_changes_the_result_and_runs_packed(self) -> None:
        fixture = decode()
        plain = fixture.run()
        for layer in fixture.layers:
            layer.logit_cap = 0.5
        assert fixture.backend._layers.unsupported_reasons() == {None}
        capped = fixture.run()
        assert fixture.fallbacks == {}
        assert not torch.allclose(plain[0], capped[0], atol=1e-3)

    def test_sinks_take_part_in_the_denominator(self) -> None:
        fixture = decode()
        plain = fixture.run()
        with_sinks = fixture.run(sinks=torch.full((4,), 3.0, dtype=torch.bfloat16))
        assert fixture.fallbacks == {}
        assert (with_sinks[0].abs() < plain[0].abs()).all()

    def test_kv_in_half_precision(self) -> None:
        fixture = decode(kv_dtype=torch.bfloat16)
        for ours, theirs in zip(fixture.run(), fixture.run_stock(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        assert fixture.fallbacks == {}

    def test_a_layer_that_keeps_no_kv_of_its_own_reads_another_ones(self) -> None:
        fixture = decode()
        layer = fixture.layers[0]
        before = fixture.pool.get_key_buffer(0).clone()
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            q, _, _ = fixture.qkv(layer)
            fixture.backend.forward(q, None, None, layer, fixture.batch, save_kv_cache=False)
        assert torch.equal(fixture.pool.get_key_buffer(0), before)
        assert fixture.fallbacks == {}


class TestStepFallbacks:
    """The whole step goes to the stock backend, with metadata, once counted, with its numbers."""

    def falls_back(self, fixture: Fixture, reason: str, handed: Handed | None = None) -> None:
        out = fixture.run(handed)
        assert fixture.fallbacks == {reason: 1}
        assert fixture.stock.metadata_calls == 1
        assert fixture.stock.layer_calls == LAYERS
        assert not any(fixture.state.counters.steps_packed.values())
        assert_same(out, fixture.run_stock())
        assert reason in fallback_reasons.EXPLANATIONS

    def test_no_paths(self) -> None:
        self.falls_back(decode(), fallback_reasons.NO_PATHS, NOTHING)

    @pytest.mark.parametrize(
        "reason", [fallback_reasons.BEAM_ROWS, fallback_reasons.NO_RADIX_CACHE, fallback_reasons.MODE]
    )
    def test_a_reason_instead_of_paths(self, reason: str) -> None:
        self.falls_back(decode(), reason, Handed(reason))

    def test_paths_that_could_not_be_read_are_counted_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = decode()
        monkeypatch.setattr(fixture.handover, "_tracker", None)
        self.falls_back(fixture, fallback_reasons.HOOK_FAILED, fixture.handover.read(fixture.batch))

    def test_other_rows_than_announced(self) -> None:
        fixture = decode()
        self.falls_back(
            fixture, fallback_reasons.ROW_MISMATCH, Handed(fixture.step, fixture.batch.req_pool_indices + 1)
        )

    def test_another_number_of_rows(self) -> None:
        fixture = decode()
        other = StepPaths(PrefixForest.from_paths([[]]), "decode", 1, 1)
        self.falls_back(fixture, fallback_reasons.ROW_MISMATCH, Handed(other, fixture.batch.req_pool_indices[:1]))

    def test_another_kind_of_step(self) -> None:
        fixture = decode()
        lengths = np.array([1, 1, 1, 1])
        other = StepPaths(fixture.step.forest, "extend", 4, 0, lengths)
        self.falls_back(fixture, fallback_reasons.ROW_MISMATCH, Handed(other, fixture.batch.req_pool_indices))

    def test_speculative_input(self) -> None:
        fixture = decode()
        fixture.batch.spec_info = SimpleNamespace()
        self.falls_back(fixture, fallback_reasons.SPECULATIVE)

    def test_half_of_a_two_batch_overlap(self) -> None:
        fixture = decode()
        fixture.batch.tbo_parent_token_range = (0, 4)
        self.falls_back(fixture, fallback_reasons.TWO_BATCH_OVERLAP)

    def test_draft_worker(self) -> None:
        self.falls_back(decode(is_draft_worker=True), fallback_reasons.DRAFT_WORKER)

    def test_no_paths_are_read_for_a_runner_that_never_packs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "has_sliding_window_pool", lambda pool: True)
        fixture = decode()
        assert {fixture.handover._tracker.never_packed(mode) for mode in MODES} == {fallback_reasons.HYBRID_SWA}

    def test_what_a_draft_model_packs_does_not_keep_paths_from_being_read(self) -> None:
        fixture = decode(is_draft_worker=True)
        assert {fixture.handover._tracker.never_packed(mode) for mode in MODES} == {None}

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_decode_context_parallelism(self, device: str) -> None:
        fixture = decode(device=device, server_args=SimpleNamespace(dcp_size=2))
        self.falls_back(fixture, fallback_reasons.DECODE_CONTEXT_PARALLEL)

    def test_no_kernel_for_the_device(self) -> None:
        settings = Settings(metrics=False, gpu_kernels="native")
        self.falls_back(decode(device="cuda", settings=settings), fallback_reasons.NO_CUDA_KERNEL)

    def test_paths_and_lengths_that_contradict_each_other(self, caplog: pytest.LogCaptureFixture) -> None:
        fixture = decode()
        # The forest says that the first two requests share 260 positions, but one of them has only 10.
        fixture.batch.seq_lens = torch.tensor([300, 10, 205, 9])
        with caplog.at_level(logging.ERROR):
            self.falls_back(fixture, fallback_reasons.PLAN_REFUSED)
        assert "Traceback" in caplog.text

    def test_encoder_decoder(self) -> None:
        fixture = decode(model_config=SimpleNamespace(is_encoder_decoder=True))
        fixture.run()
        assert fixture.fallbacks == {fallback_reasons.ENCODER_DECODER: 1}

    def test_hybrid_sliding_window_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "has_sliding_window_pool", lambda pool: True)
        self.falls_back(decode(), fallback_reasons.HYBRID_SWA)

    def test_idle(self) -> None:
        fixture = decode()
        fixture.batch.forward_mode = ForwardMode.IDLE
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            layer = fixture.layers[0]
            out = fixture.backend.forward(torch.empty(0, 128), None, None, layer, fixture.batch)
        assert out.shape == (0, 128)
        assert fixture.fallbacks == {fallback_reasons.IDLE: 1}

    def test_graph_capture_and_replay(self) -> None:
        fixture = decode()
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata_out_graph(fixture.batch, in_capture=True)
        assert fixture.fallbacks == {fallback_reasons.GRAPH: 1}

    def test_a_step_after_a_fallback_runs_packed_again(self) -> None:
        fixture = decode()
        fixture.run(NOTHING)
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.state.counters.steps_packed["decode"] == 1

    def test_a_packed_step_leaves_nothing_for_a_step_without_paths(self) -> None:
        fixture = decode()
        fixture.run()
        fixture.run(NOTHING)
        assert fixture.stock.layer_calls == LAYERS

    def test_the_first_of_each_reason_is_explained_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        fixture = decode()
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                fixture.run(NOTHING)
        assert caplog.text.count(fallback_reasons.EXPLANATIONS[fallback_reasons.NO_PATHS]) == 1
        assert fixture.fallbacks == {fallback_reasons.NO_PATHS: 3}


class TestLayerFallbacks:
    """One layer goes to the stock backend, whose metadata is there when it is needed; the others run packed."""

    def one_layer(self, change: dict[str, Any], reason: str, *, stock: bool = True) -> None:
        fixture = decode()
        for name, value in change.items():
            setattr(fixture.layers[1], name, value)
        out = fixture.run()
        assert fixture.fallbacks == {reason: 1}
        assert fixture.stock.metadata_calls == 1
        assert fixture.stock.layer_calls == 1
        assert fixture.state.counters.steps_packed["decode"] == 1
        if stock:
            assert_same(out, fixture.run_stock())

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
        fixture = decode()
        for name, value in change.items():
            setattr(fixture.layers[1], name, value)
        assert fixture.backend._layers.facts(fixture.layers[1]).unsupported_reason == reason
        assert reason in fallback_reasons.EXPLANATIONS

    def test_a_kv_cache_in_a_type_the_packed_path_does_not_know(self) -> None:
        fixture = decode(kv_dtype=torch.float8_e5m2)
        fixture.backend._layers.scan_model()
        assert fixture.backend._layers.unsupported_reasons() == {fallback_reasons.KV_DTYPE}

    def test_an_argument_nobody_knows(self) -> None:
        fixture = decode()
        layer = fixture.layers[0]
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            with pytest.raises(TypeError):  # torch_native does not know it either
                fixture.backend.forward(*fixture.qkv(layer), layer, fixture.batch, q_rope=torch.zeros(1))
        assert fixture.fallbacks == {fallback_reasons.CALL_ARGUMENTS: 1}

    def test_padded_queries(self) -> None:
        fixture = decode()
        layer = fixture.layers[0]
        q, _, _ = fixture.qkv(layer)
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            reason = fixture.backend.decision.step.unsupported_call(torch.cat([q, q]), layer, {})
        assert reason == fallback_reasons.ROW_MISMATCH

    def test_the_next_step_prepares_the_stock_backend_beforehand(self) -> None:
        fixture = decode()
        fixture.layers[1].attn_type = AttentionType.ENCODER_ONLY
        fixture.run()
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
        assert fixture.stock.metadata_calls == 2


class TestPlanReuse:
    def test_steady_decode_plans_once(self) -> None:
        fixture = decode()
        for _ in range(10):
            fixture.run()
        assert (fixture.state.counters.plans_made, fixture.state.counters.plans_reused) == (1, 9)

    def test_growing_tails_keep_the_numbers_right(self) -> None:
        fixture = decode()
        fixture.run()
        for extra in range(1, 4):
            for row, length in enumerate(fixture.seq_lens, 1):
                fixture.rows.req_to_token[row, length + extra - 1] = extra
            fixture.batch.seq_lens = torch.tensor(fixture.seq_lens) + extra
            fixture.batch.out_cache_loc = torch.full((4,), extra)
            assert_same(fixture.run(), fixture.run_stock())
        assert fixture.state.counters.plans_made == 1


class TestDelegation:
    def test_no_member_of_the_base_class_answers_with_its_default(self) -> None:
        own = {name for name in vars(PrefixPackBackend) if not name.startswith("__")}
        for name in delegated_members(AttentionBackend, type("Empty", (), {})):
            assert name in own, f"AttentionBackend.{name} would bypass the stock backend"

    def test_methods_properties_and_attributes_are_the_stock_ones(self) -> None:
        fixture = decode()
        assert fixture.backend.support_triton() is False  # torch_native's answer; the base class says True
        fixture.stock.extend_dummy_seqs_capped_by_req_pool = True
        assert fixture.backend.extend_dummy_seqs_capped_by_req_pool is True
        fixture.backend.forward_metadata = "written through"
        assert fixture.stock.forward_metadata == "written through"

    def test_what_only_the_stock_backend_has_is_found(self) -> None:
        fixture = decode()
        fixture.stock.workspace_of_its_own = 5
        assert fixture.backend.workspace_of_its_own == 5
        assert not hasattr(fixture.backend, "nobody_has_this")

    def test_lengths_on_the_host_are_asked_for_whatever_the_stock_backend_needs(self) -> None:
        fixture = decode()
        fixture.stock.needs_cpu_seq_lens = False
        assert fixture.backend.needs_cpu_seq_lens is True
