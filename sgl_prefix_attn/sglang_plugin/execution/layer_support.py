"""The attention layers and KV buffers that the packed path supports, and their parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sgl_prefix_attn.core.limits import head_dim_fits
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
KV_DTYPES = (*DTYPES, FP8)


class KvScales(NamedTuple):
    """Factors for the stored keys and values of a layer."""

    k: float
    v: float


UNSCALED = KvScales(1.0, 1.0)


def attention_layers(model: Any) -> Iterator[Any]:
    """The RadixAttention modules of a model; none for a model that is not a torch module."""
    from sglang.srt.layers.radix_attention import RadixAttention

    if isinstance(model, torch.nn.Module):
        yield from (module for module in model.modules() if isinstance(module, RadixAttention))


def unsupported_layer(layer: Any) -> Reason | None:
    """The reason why a layer cannot run packed, None if it can."""
    if layer.is_cross_attention:
        return fallback_reasons.CROSS_ATTENTION
    if _plain(layer.attn_type) != "decoder":
        return fallback_reasons.NON_CAUSAL
    head_dim = layer.qk_head_dim
    if layer.v_head_dim != head_dim or not head_dim_fits(head_dim):
        return fallback_reasons.HEAD_DIM
    if layer.tp_v_head_num != layer.tp_k_head_num or layer.tp_q_head_num % layer.tp_k_head_num:
        return fallback_reasons.HEAD_GROUPS
    if (
        (layer.logit_cap and layer.logit_capping_method != "tanh")
        or getattr(layer, "xai_temperature_len", -1) > 0
        or getattr(layer, "use_irope", False)
        or getattr(layer, "pos_encoding_mode", "NONE") != "NONE"
    ):
        return fallback_reasons.LAYER_VARIANT
    return None


def unsupported_buffers(layer: Any, k_cache: Any, v_cache: Any) -> Reason | None:
    """The reason why the packed path cannot read the KV buffers of a layer, None if it can."""
    for cache in (k_cache, v_cache):
        if not isinstance(cache, torch.Tensor) or cache.dim() != 3:
            return fallback_reasons.KV_LAYOUT
        if cache.dtype not in KV_DTYPES:
            return fallback_reasons.KV_DTYPE
        if tuple(cache.shape[1:]) != (layer.tp_k_head_num, layer.qk_head_dim) or cache.stride(2) != 1:
            return fallback_reasons.KV_LAYOUT
    if k_cache.dtype != v_cache.dtype:
        return fallback_reasons.KV_DTYPE
    return None


def kv_scales(layer: Any) -> KvScales | None:
    """The scales of a layer over an fp8 cache, None if the host does not know them.

    As in the stock backends, the KV pool divides by `k_scale` and `v_scale` (device tensors, numbers or None).
    `k_scale_float` and `v_scale_float` are the host's copies of scales that a checkpoint brought.
    """
    k = _on_host(layer.k_scale, layer.k_scale_float)
    v = _on_host(layer.v_scale, layer.v_scale_float)
    return None if k is None or v is None else KvScales(k, v)


def _on_host(scale: Any, on_host: Any) -> float | None:
    if scale is None:
        return 1.0
    if on_host is None:
        on_host = scale  # a number if the scales came from a file
    return float(on_host) if isinstance(on_host, (int, float)) and 0.0 < on_host < math.inf else None


def layer_shape(layer: Any, kv_dtype: torch.dtype) -> ModelShape:
    """The planner's shape of a layer."""
    return ModelShape(
        q_heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        kv_bytes=kv_dtype.itemsize,
    )


def window_left(layer: Any) -> int:
    """Tokens that a query sees before its own position; -1: all. Same meaning as in SGLang's torch_native."""
    window = layer.sliding_window_size
    return -1 if window is None or window < 0 else int(window)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
