"""Which attention layers and KV buffers the packed path can serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.sglang_plugin import reasons

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16


def attention_layers(model: Any) -> Iterator[Any]:
    """The RadixAttention modules of a model; none for a model that is not a torch module."""
    from sglang.srt.layers.radix_attention import RadixAttention

    if isinstance(model, torch.nn.Module):
        yield from (module for module in model.modules() if isinstance(module, RadixAttention))


def unsupported_layer(layer: Any) -> str | None:
    """Why a layer has to run on the inner backend (a key of `reasons.EXPLANATIONS`), None if it can run packed."""
    if layer.is_cross_attention:
        return reasons.CROSS_ATTENTION
    if _plain(layer.attn_type) != "decoder":
        return reasons.NON_CAUSAL
    head_dim = layer.qk_head_dim
    if layer.v_head_dim != head_dim or head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
        return reasons.HEAD_DIM
    if layer.tp_v_head_num != layer.tp_k_head_num or layer.tp_q_head_num % layer.tp_k_head_num:
        return reasons.HEAD_GROUPS
    if (
        (layer.logit_cap and layer.logit_capping_method != "tanh")
        or getattr(layer, "xai_temperature_len", -1) > 0
        or getattr(layer, "use_irope", False)
        or getattr(layer, "pos_encoding_mode", "NONE") != "NONE"
    ):
        return reasons.LAYER_VARIANT
    return None


def unsupported_buffers(layer: Any, k_cache: Any, v_cache: Any) -> str | None:
    """Why what the KV pool returns for a layer does not suit the packed path, None if it does."""
    for cache in (k_cache, v_cache):
        if not isinstance(cache, torch.Tensor) or cache.dim() != 3:
            return reasons.KV_LAYOUT
        if cache.dtype not in DTYPES:
            return reasons.KV_DTYPE
        if tuple(cache.shape[1:]) != (layer.tp_k_head_num, layer.qk_head_dim) or cache.stride(2) != 1:
            return reasons.KV_LAYOUT
    if k_cache.dtype != v_cache.dtype:
        return reasons.KV_DTYPE
    return None


def layer_shape(layer: Any, kv_dtype: torch.dtype) -> ModelShape:
    """The planner's view of a layer."""
    return ModelShape(
        q_heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        kv_bytes=kv_dtype.itemsize,
    )


def window_left(layer: Any) -> int:
    """Positions before the query's own that it still sees; -1: all. Same meaning as in SGLang's torch_native."""
    window = layer.sliding_window_size
    return -1 if window is None or window < 0 else int(window)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
