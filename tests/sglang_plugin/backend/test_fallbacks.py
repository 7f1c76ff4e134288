"""Steps and layers that go to the stock backend: each for its reason, counted once, with the right numbers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import MODES, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.backend.test_backend import assert_same, decode
from tests.sglang_plugin.fixture import LAYERS, Fixture


class TestSteps:
    """The whole step goes to the stock backend, with metadata."""

    def falls_back(self, fixture: Fixture, reason: reasons.Reason, handed: Handed | None = None) -> None:
        out = fixture.run(handed)
        assert fixture.fallbacks == {reason: 1}
        assert (fixture.stock.metadata_calls, fixture.stock.layer_calls) == (1, LAYERS)
        assert not any(fixture.state.counters.steps_packed.values())
        assert_same(out, fixture.run_stock())

    @pytest.mark.parametrize("reason", [reasons.NO_PATHS, reasons.BEAM_ROWS, reasons.NO_RADIX_CACHE, reasons.MODE])
    def test_a_reason_instead_of_paths(self, reason: reasons.Reason) -> None:
        self.falls_back(decode(), reason, NOTHING if reason == reasons.NO_PATHS else Handed(reason))

    def test_paths_that_could_not_be_read_are_counted_once(self) -> None:
        fixture = decode()
        self.falls_back(fixture, reasons.HOOK_FAILED, fixture.handover.read(None))

    @pytest.mark.parametrize("other", ["rows", "number of rows", "kind of step"])
    def test_paths_of_another_batch(self, other: str) -> None:
        fixture = decode()
        rows = fixture.batch.req_pool_indices
        handed = {
            "rows": Handed(fixture.step, rows + 1),
            "number of rows": Handed(StepPaths(PrefixForest.from_paths([[]]), "decode", 1), rows[:1]),
            "kind of step": Handed(StepPaths(fixture.step.forest, "extend", 4, np.ones(4, dtype=np.int64)), rows),
        }[other]
        self.falls_back(fixture, reasons.ROW_MISMATCH, handed)

    @pytest.mark.parametrize(
        ("attribute", "value", "reason"),
        [
            ("spec_info", object(), reasons.SPECULATIVE),
            ("tbo_parent_token_range", (0, 4), reasons.TWO_BATCH_OVERLAP),
            ("multi_item_delimiter_indices", [torch.tensor([2])], reasons.ITEM_MASKS),
            # The forest says that the first two requests share 260 positions, but one of them has only 10.
            ("seq_lens", torch.tensor([300, 10, 205, 9]), reasons.PLAN_REFUSED),
        ],
    )
    def test_batches(self, attribute: str, value: Any, reason: reasons.Reason) -> None:
        fixture = decode()
        setattr(fixture.batch, attribute, value)
        self.falls_back(fixture, reason)

    @pytest.mark.parametrize(
        ("runner", "reason"),
        [
            ({"is_draft_worker": True}, reasons.DRAFT_WORKER),
            ({"server_args": SimpleNamespace(dcp_size=2)}, reasons.DECODE_CONTEXT_PARALLEL),
            ({"server_args": SimpleNamespace(dcp_size=2), "device": "cuda"}, reasons.DECODE_CONTEXT_PARALLEL),
            ({"spec_algorithm": SpeculativeAlgorithm.EAGLE, "device": "cuda"}, reasons.SPECULATIVE),
            ({"device": "cuda", "settings": Settings(metrics=False, gpu_kernels="native")}, reasons.NO_CUDA_KERNEL),
            ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, reasons.ENCODER_DECODER),
        ],
        ids=lambda value: str(value) if isinstance(value, reasons.Reason) else "",
    )
    def test_servers(self, runner: dict[str, Any], reason: reasons.Reason) -> None:
        self.falls_back(decode(**runner), reason)

    def test_a_server_whose_tables_name_virtual_slots_and_whose_paths_are_not_even_read(self) -> None:
        fixture = decode(kv_index_translator=SimpleNamespace(is_translating=True))
        self.falls_back(fixture, reasons.VIRTUAL_SLOTS)
        assert {fixture.handover._tracker.why_stock(mode) for mode in MODES} == {reasons.VIRTUAL_SLOTS}

    @pytest.mark.parametrize(("device", "refused"), [("cuda", True), ("cpu", False)])
    def test_batches_with_drafts_are_not_read_where_none_runs_packed(self, device: str, refused: bool) -> None:
        fixture = decode(spec_algorithm=SpeculativeAlgorithm.EAGLE, device=device)
        assert fixture.handover._tracker.refuses_drafts is refused

    def test_idle(self) -> None:
        fixture = decode()
        fixture.batch.forward_mode = ForwardMode.IDLE
        fixture.prepare()
        out = fixture.backend.forward(torch.empty(0, 128), None, None, fixture.layers[0], fixture.batch)
        assert out.shape == (0, 128)
        assert fixture.fallbacks == {reasons.IDLE: 1}

    def test_graphs_of_a_cpu(self) -> None:
        fixture = decode()
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata_out_graph(fixture.batch, in_capture=True)
        assert fixture.fallbacks == {reasons.GRAPH: 1}

    def test_packed_and_stock_steps_take_turns(self) -> None:
        fixture = decode()
        for _ in range(2):
            fixture.run(NOTHING)
            assert_same(fixture.run(), fixture.run_stock())
        assert fixture.stock.layer_calls == 2 * LAYERS
        assert fixture.state.counters.steps_packed["decode"] == 2

    def test_the_first_of_each_reason_is_explained_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        fixture = decode()
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                fixture.run(NOTHING)
        assert caplog.text.count(reasons.NO_PATHS.text) == 1
        assert fixture.fallbacks == {reasons.NO_PATHS: 3}


class TestLayers:
    """One layer goes to the stock backend, whose metadata is there when it is needed; the others run packed."""

    @staticmethod
    def changed(change: dict[str, Any]) -> Fixture:
        fixture = decode()
        for name, value in change.items():
            setattr(fixture.layers[1], name, value)
        return fixture

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"attn_type": AttentionType.ENCODER_ONLY}, reasons.NON_CAUSAL),
            ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, reasons.NON_CAUSAL),
            ({"logit_cap": 5.0, "logit_capping_method": "sigmoid"}, reasons.LAYER_VARIANT),
            ({"xai_temperature_len": 1024}, reasons.LAYER_VARIANT),
            ({"use_irope": True}, reasons.LAYER_VARIANT),
            ({"pos_encoding_mode": "ROPE_LLAMA"}, reasons.LAYER_VARIANT),
        ],
    )
    def test_kinds_of_attention(self, change: dict[str, Any], reason: reasons.Reason) -> None:
        fixture = self.changed(change)
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {reason: 1}
        assert (fixture.stock.metadata_calls, fixture.stock.layer_calls) == (1, 1)
        assert fixture.state.counters.steps_packed["decode"] == 1
        fixture.prepare()
        assert fixture.stock.metadata_calls == 2, "the next step makes the stock metadata beforehand"

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"is_cross_attention": True}, reasons.CROSS_ATTENTION),
            ({"v_head_dim": 16}, reasons.HEAD_DIM),
            ({"qk_head_dim": 40, "v_head_dim": 40}, reasons.HEAD_DIM),
            ({"qk_head_dim": 512, "v_head_dim": 512}, reasons.HEAD_DIM),
            ({"tp_q_head_num": 3}, reasons.HEAD_GROUPS),
            ({"qk_head_dim": 64, "v_head_dim": 64}, reasons.KV_LAYOUT),
        ],
    )
    def test_shapes(self, change: dict[str, Any], reason: reasons.Reason) -> None:
        fixture = self.changed(change)
        assert fixture.backend._layers.facts(fixture.layers[1]).unsupported_reason == reason

    def test_an_unknown_argument(self) -> None:
        fixture = decode()
        fixture.prepare()
        layer = fixture.layers[0]
        with pytest.raises(TypeError):  # torch_native does not know it either
            fixture.backend.forward(*fixture.qkv(layer), layer, fixture.batch, q_rope=torch.zeros(1))
        assert fixture.fallbacks == {reasons.CALL_ARGUMENTS: 1}

    def test_padded_queries(self) -> None:
        fixture = decode()
        fixture.prepare()
        layer, step = fixture.layers[0], fixture.backend.decision.step
        assert step is not None
        q, _, _ = fixture.qkv(layer)
        assert step.unsupported_call(torch.cat([q, q]), layer, {}) == reasons.ROW_MISMATCH
