"""SGLang's `trtllm_mha` beside packed layers: both must read and write the same slots, types and scales.

It views the KV buffers as pages of [page, tokens, kv heads, head dim], and stores fp8 KV with a kernel of its own.
Tests compare its class with ours over emulated kernels. On a GPU only decode with 16-bit KV ran wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from sgl_prefix_attn.sglang_plugin.execution.layer_support import FP8, kv_scales
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

NAME: Final = "trtllm_mha"
TESTED: Final = "of wrapped trtllm_mha decode with 16-bit KV ran on an H200; the rest is contract-tested"
# Models that write KV through members of this backend alone.
WRITE_THROUGH_IT: Final = frozenset({"MuseSparkForConditionalGeneration", "MuseSparkTextForCausalLM"})

Store = Callable[[Any, torch.Tensor, torch.Tensor, Any, Any], Any]


def own_store(stock: Any) -> Store | None:
    """The backend's way to store fp8 KV, as store(None, k, v, layer, forward_batch); None if it is not known."""
    return getattr(stock, "_fused_fp8_qkv_kv_cache", None)


def unsupported_view(stock: Any, layers: list[Any], pool: Any) -> Reason | None:
    """The reason why the backend and packed layers would not share a KV pool, None if they do.

    Args:
        stock: the backend.
        layers: those that would run packed.
        pool: their KV pool, of a class that packed layers read.
    """
    page = getattr(stock, "page_size", 0)
    if not layers or page < 1:
        return fallback_reasons.KV_LAYOUT
    for layer in layers:
        for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)):
            # Slot s is token s % page of page s // page only in whole pages without gaps.
            if not buffer.is_contiguous() or buffer.shape[0] % page:
                return fallback_reasons.KV_LAYOUT
            if buffer.dtype is not getattr(stock, "data_type", None):
                return fallback_reasons.KV_DTYPE
        if stock.data_type is FP8 and not _same_scales(stock, layer):
            return fallback_reasons.KV_SCALES
    return None


def _same_scales(stock: Any, layer: Any) -> bool:
    """Whether the backend reads a layer's fp8 KV with the factors that packed layers use, and stores it as known."""
    ours, reads = kv_scales(layer), getattr(stock, "_get_bmm_scales", None)
    if ours is None or reads is None or own_store(stock) is None:
        return False
    return tuple(reads(layer)) == (ours.k * layer.scaling, ours.v)
