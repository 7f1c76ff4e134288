"""The KV pools whose slots the packed path can read.

Packed layers read `req_to_token` as slots of [slots, kv heads, head dim] buffers. A pool that stores something else
there, or arranges its buffers otherwise, gives wrong tokens without an error. So only pools that were read and tested
are accepted, by the name of their class. A subclass may change either, and is refused like an unknown pool.
"""

from __future__ import annotations

from typing import Any

from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

# Pools with one K and one V buffer a layer, in which a slot is a row.
PLAIN_POOLS = frozenset({"MHATokenToKVPool"})
# Pools for several kinds of layers, and the attribute with the pool of the layers that may run packed.
COMPOSITE_POOLS = {
    "HybridLinearKVPool": "full_kv_pool",
    "SWAKVPool": "full_kv_pool",
    "MiniMaxSparseKVPool": "main_pool",
}
_UNIFIED = "Unified"


def unsupported_pool(pool: Any) -> Reason | None:
    """The reason why the packed path supports no layer of a KV pool, None if it may support some.

    Call it before buffers are looked at: some of these pools copy the whole buffer on access.
    """
    name = type(pool).__name__
    if name.startswith(_UNIFIED):
        return fallback_reasons.VIRTUAL_SLOTS
    if name in COMPOSITE_POOLS:
        pool = getattr(pool, COMPOSITE_POOLS[name])
        name = type(pool).__name__
        if name.startswith(_UNIFIED):
            return fallback_reasons.VIRTUAL_SLOTS
    if getattr(pool, "k_scale_buffer", None) is not None or getattr(pool, "is_quantized_kv_cache", False):
        return fallback_reasons.KV_DTYPE
    if name not in PLAIN_POOLS or getattr(pool, "use_hnd", False):
        return fallback_reasons.KV_LAYOUT
    return None if getattr(pool, "kv_cache_layout", "nhd") == "nhd" else fallback_reasons.KV_LAYOUT


def unsupported_slots(pool: Any, layer: Any) -> Reason | None:
    """The reason why `req_to_token` does not name the slots of a layer's KV, None if it does.

    A pool with sliding-window layers has slots of their own for these. They are given up as soon as they leave the
    window, so a shared prefix has none.
    """
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None:
        return None
    entry = mapping.get(layer.layer_id)
    if entry is None:
        return fallback_reasons.KV_LAYOUT
    return fallback_reasons.HYBRID_SWA if entry[1] else None
