"""Images of Gemma 3 over the Triton backend: their mask reaches the stock backend, made by SGLang's own code."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_attn_backend
from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import eligibility
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.gemma3_image_mask import around_prepare_attn_masks
from sgl_prefix_attn.sglang_plugin.compat import hooks
from sgl_prefix_attn.sglang_plugin.startup import factory, hook_table
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import Fixture
from tests.sglang_plugin.gpu_fixture import host_kernels
from tests.support.server_facts import server_facts

# The tokens 1 to 3 of five are an image's.
TOKENS, IMAGE = 5, (1, 3)
ARGUMENTS = SimpleNamespace(chunked_prefill_size=512, enable_mixed_chunk=True)


def triton_backend() -> Any:
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    backend.forward_metadata = SimpleNamespace(custom_mask=None, mask_indptr=None)
    return backend


def ours(stock: Any) -> Any:
    backend = PrefixPackBackend.__new__(PrefixPackBackend)
    backend.stock = stock
    return backend


def prepare(backend: Any, *, hooked: bool = True) -> Any:
    """The mask that the model makes of a prefill with an image, None if it makes none."""
    image = SimpleNamespace(is_image=lambda: True, offsets=[IMAGE])
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        extend_seq_lens=torch.tensor([TOKENS]),
        extend_prefix_lens=torch.tensor([0]),
        mm_inputs=[SimpleNamespace(mm_items=[image])],
    )
    make = Gemma3ForConditionalGeneration.prepare_attn_masks
    if hooked:
        make = functools.partial(around_prepare_attn_masks, make)
    with forward_context(ForwardContext(attn_backend=backend)):
        make(None, batch, torch.zeros(TOKENS, dtype=torch.int64), mask_dtype=torch.bool)
        assert get_attn_backend() is backend
    return backend.forward_metadata.custom_mask


def test_the_stock_backend_gets_the_mask_that_a_stock_one_gets() -> None:
    expected = prepare(triton_backend(), hooked=False).view(TOKENS, TOKENS)
    assert expected[IMAGE[0], IMAGE[1]], "tokens of an image see each other"
    assert not expected[0, 1]
    stock = triton_backend()
    assert torch.equal(prepare(ours(stock)).view(TOKENS, TOKENS), expected)
    assert stock.forward_metadata.custom_mask is not None


def test_other_backends_are_left_alone() -> None:
    stock = triton_backend()
    assert prepare(stock) is not None
    assert prepare(ours(SimpleNamespace(forward_metadata=SimpleNamespace(custom_mask=None)))) is None


def test_the_hook_sits_where_the_model_calls() -> None:
    original = Gemma3ForConditionalGeneration.prepare_attn_masks
    try:
        assert hooks.ensure_applied(hook_table.IMAGE_MASK_HOOKS) == []
        assert Gemma3ForConditionalGeneration.prepare_attn_masks is not original
    finally:
        Gemma3ForConditionalGeneration.prepare_attn_masks = original


def test_packed_prefill_knows_no_such_mask_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    facts = server_facts(hf_config=SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"]))
    assert not factory.masks_images(facts, "triton", Settings(pack_extend=True))
    assert "with pack_extend, tokens of an image do not see those that come after them" in caplog.text


def test_wrapped_the_model_finds_the_triton_backend_itself() -> None:
    expected = prepare(triton_backend(), hooked=False)
    stock = triton_backend()
    wrapped = ours(stock)
    wrapped._wraps = "triton"
    assert torch.equal(prepare(wrapped, hooked=False), expected)
    assert stock.forward_metadata.custom_mask is not None


@pytest.mark.parametrize("packs", [{}, {"pack_extend": True}, {"pack_mixed": True}])
def test_wrap_mode_refuses_packed_prefill_of_such_a_model(packs, monkeypatch):
    monkeypatch.setattr(eligibility, "choose_kernels", lambda setting, device: host_kernels())
    fixture = Fixture([[]], [9], head_dim=64, kv_dtype=torch.bfloat16, dtype=torch.bfloat16, server_args=ARGUMENTS)
    model = torch.nn.ModuleList(fixture.layers)
    model.prepare_attn_masks = None
    fixture.runner.device, fixture.runner.model = "cuda", model
    reason = eligibility.wrap_refusal(fixture.facts, "triton", triton_backend(), Settings(**packs))
    assert reason == (fallback_reasons.IMAGE_MASKS if packs else None)
