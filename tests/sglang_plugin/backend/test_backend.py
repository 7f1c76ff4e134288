"""The backend: what runs packed gives torch_native's numbers, what cannot goes to the stock backend, counted."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import server_info
from sgl_prefix_attn.sglang_plugin.backend.stock_proxy import StockProxy
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import LENGTHS, SHARED, Fixture, tree_masks

MODES: tuple[Mode, ...] = ("decode", "extend", "mixed")


def decode(**options: Any) -> Fixture:
    return Fixture(SHARED, LENGTHS, **options)


def extend(**options: Any) -> Fixture:
    return Fixture(SHARED, LENGTHS, [4, 1, 5, 9], **options)


def mixed(**options: Any) -> Fixture:
    return Fixture(SHARED, LENGTHS, [4, 1, 1, 1], mixed=True, **options)


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

    def test_can_be_switched_off(self, make: Any, mode: str) -> None:
        fixture = make(settings=Settings(metrics=False, **{f"pack_{mode}": False}))
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.DISABLED: 1}


class TestVerifySteps:
    """Drafts of speculative decoding, checked by the target model."""

    def step(self, drafts: int = 3, **options: Any) -> tuple[Fixture, list[torch.Tensor]]:
        """A step whose drafts are a chain, and its numbers: those of a prefill of the drafts."""
        fixture = Fixture(SHARED, LENGTHS, [drafts] * len(LENGTHS), **options)
        expected = fixture.run_stock()
        fixture.verify()
        return fixture, expected

    @pytest.mark.parametrize("drafts", [1, 2, 9])
    def test_a_chain_sees_what_is_before_it(self, drafts: int) -> None:
        fixture, expected = self.step(drafts)
        assert_same(fixture.run(), expected)
        assert fixture.state.counters.steps_packed["verify"] == 1
        assert fixture.fallbacks == {}
        batch = server_info.batch_state(fixture.handed)
        assert batch is not None
        assert (batch["mode"], batch["seq_lens"], batch["query_lens"]) == ("verify", LENGTHS, [drafts] * 4)

    @pytest.mark.parametrize("of_gpu", [False, True], ids=["mask of drafts", "mask of all positions"])
    @pytest.mark.parametrize("parents", [(-1, 0, 1, 2), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2, 3), tuple(range(-1, 63))])
    def test_a_draft_of_a_tree_sees_its_ancestors(self, parents: tuple[int, ...], of_gpu: bool) -> None:
        drafts = len(parents)
        lengths = [length + drafts for length in LENGTHS]
        fixture = Fixture(SHARED, lengths, [drafts] * len(lengths))
        mask = torch.eye(drafts, dtype=torch.bool)
        for draft, parent in enumerate(parents[1:], 1):
            mask[draft] |= mask[parent]
        fixture.verify(topk=2, custom_mask=tree_masks(mask, fixture.seq_lens, of_gpu=of_gpu))
        packed = fixture.run()
        assert fixture.fallbacks == {}
        held = weakref.ref(fixture.batch.spec_info.custom_mask)
        fixture.batch.spec_info.custom_mask = None
        assert held() is None, "the step keeps SGLang's mask"
        for ours, layer in zip(packed, fixture.layers, strict=True):
            q, _, _ = fixture.qkv(layer)
            for request, length in enumerate(lengths):
                slots = fixture.rows.req_to_token[request + 1, :length].long()
                seen = torch.cat([torch.ones(drafts, length - drafts, dtype=torch.bool), mask], dim=1)
                tokens = slice(request * drafts, (request + 1) * drafts)
                expected = torch.nn.functional.scaled_dot_product_attention(
                    q[tokens].view(drafts, layer.tp_q_head_num, -1).transpose(0, 1),
                    fixture.pool.get_key_buffer(layer.layer_id)[slots].transpose(0, 1),
                    fixture.pool.get_value_buffer(layer.layer_id)[slots].transpose(0, 1),
                    attn_mask=seen,
                    enable_gqa=True,
                )
                torch.testing.assert_close(
                    ours[tokens], expected.transpose(0, 1).reshape(drafts, -1), rtol=2e-5, atol=2e-5
                )

    def test_window_layers_of_a_tree_go_to_the_stock_backend(self) -> None:
        """Positions of a tree are not those of its slots."""
        fixture, _ = self.step()
        mask = tree_masks(torch.ones(3, 3, dtype=torch.bool).tril(), fixture.seq_lens, of_gpu=False)
        vars(fixture.batch.spec_info).update(topk=2, custom_mask=mask)
        fixture.prepare()
        layer, step = fixture.layers[0], fixture.backend.decision.step
        assert step is not None
        q, _, _ = fixture.qkv(layer)
        assert step.unsupported_call(q, layer, {}) is None
        layer.sliding_window_size = 7
        assert step.unsupported_call(q, layer, {}) == fallback_reasons.SPECULATIVE_TREE

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [({"pack_decode": False}, {fallback_reasons.DISABLED: 1}), ({"route": "stock"}, {})],
        ids=["switched off", "stock route"],
    )
    def test_settings_of_decode_are_those_of_verify_steps(self, settings: Any, reason: dict[str, int]) -> None:
        fixture, _ = self.step(settings=Settings(metrics=False, **settings))
        fixture.prepare()
        assert fixture.backend.decision.step is None
        assert fixture.fallbacks == reason

    @pytest.mark.parametrize(
        ("info", "reason"),
        [
            ({"topk": 4, "custom_mask": None}, fallback_reasons.SPECULATIVE_TREE),
            ({"topk": 4, "custom_mask": torch.ones(4 * 300, dtype=torch.bool)}, fallback_reasons.SPECULATIVE_TREE),
            ({"ragged_verify_layout": object()}, fallback_reasons.SPECULATIVE),
        ],
        ids=["no mask", "a mask of all positions", "ragged"],
    )
    def test_other_drafts_go_to_the_stock_backend(self, info: Any, reason: fallback_reasons.Reason) -> None:
        fixture, _ = self.step()
        vars(fixture.batch.spec_info).update(info)
        fixture.prepare()
        assert fixture.backend.decision.step is None
        assert fixture.fallbacks == {reason: 1}


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


class TestDelegation:
    def test_no_member_of_the_base_class_answers_with_its_default(self) -> None:
        members = {name for name in dir(AttentionBackend) if not name.startswith(("__", "_abc_"))}
        assert {"forward", "init_forward_metadata"} <= members
        assert members <= set(vars(StockProxy)), "these would bypass the stock backend"

    def test_methods_properties_and_attributes_are_the_stock_ones(self) -> None:
        fixture = decode()
        assert fixture.backend.support_triton() is False  # torch_native's answer; the base class says True
        fixture.stock.extend_dummy_seqs_capped_by_req_pool = True
        assert fixture.backend.extend_dummy_seqs_capped_by_req_pool is True
        for name in ("forward_metadata", "token_to_kv_pool"):  # a frozen draft gets the target's pool for its steps
            setattr(fixture.backend, name, "written through")
            assert getattr(fixture.stock, name) == "written through"

    def test_what_only_the_stock_backend_has_is_found(self) -> None:
        fixture = decode()
        fixture.stock.workspace_of_its_own = 5
        assert fixture.backend.workspace_of_its_own == 5
        assert not hasattr(fixture.backend, "nobody_has_this")
