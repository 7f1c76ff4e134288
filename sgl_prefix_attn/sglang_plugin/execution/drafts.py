"""Drafts of speculative decoding: what a verify step needs to know of SGLang's verify input.

Each request has n drafts behind its committed KV. In a chain a draft sees all drafts before it, as new tokens of a
prefill do. In a tree it sees its ancestors alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_prefix_attn.core.draft_tables import MOST_TREE_DRAFTS
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.gpu import current_gpu
from sgl_prefix_attn.routing import verify
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.execution.layer_support import attention_layers, layer_shape, unsupported_layer
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason


def is_chain(info: Any) -> bool:
    """Whether the drafts of each request are a chain. False also where only their mask can tell (NGRAM)."""
    return getattr(info, "topk", None) == 1


def why_no_packed_verify(facts: ServerFacts, reads_trees: bool) -> Reason | None:
    """The reason why a GPU server's verify steps cannot run packed, None if they can or if it has none.

    A packed graph has no fallback for a step whose drafts no kernel can tell apart, so this is known beforehand.

    Args:
        reads_trees: whether kernels read masks of visible drafts.
    """
    if not facts.speculates:
        return None
    if not facts.has_uniform_drafts:
        return fallback_reasons.SPECULATIVE
    drafts = facts.drafts
    if facts.has_draft_chains or (reads_trees and drafts <= MOST_TREE_DRAFTS):
        return None
    return fallback_reasons.SPECULATIVE_TREE


def packs_by_default(facts: ServerFacts, kernels: str, stock: str) -> bool:
    """Whether verify steps of a GPU server run packed without a setting.

    Drafts are chains, and `routing.verify` was measured on this GPU for all layers. SGLang bounds the lengths of such
    steps in host memory. Otherwise each one would wait for the device.

    Args:
        kernels: name of the packed ones.
        stock: the stock backend's name.
    """
    if not facts.speculates or not facts.has_draft_chains or not versions.keeps_committed_lens():
        return False
    drafts, dtype = facts.drafts, facts.kv_cache_dtype
    layers = [layer for layer in attention_layers(facts.model) if unsupported_layer(layer) is None]
    if not layers or dtype is None:
        return False
    gpu, shapes = current_gpu().name, {layer_shape(layer, dtype) for layer in layers}
    return all(verify.may_pack(gpu, kernels, stock, shape, drafts) for shape in shapes)


def unsupported_verify(forward_batch: Any, requests: int, reads_trees: bool) -> Reason | None:
    """The reason why a verify step cannot run packed, None if it can.

    Args:
        forward_batch: SGLang's ForwardBatch.
        requests: of the batch, without those that a graph pads.
        reads_trees: whether kernels read masks of visible drafts.
    """
    info = forward_batch.spec_info
    if getattr(info, "ragged_verify_layout", None) is not None:
        return fallback_reasons.SPECULATIVE
    if is_chain(info):
        return None
    drafts, mask = info.draft_token_num, info.custom_mask
    if not reads_trees or mask is None or drafts > MOST_TREE_DRAFTS:
        return fallback_reasons.SPECULATIVE_TREE
    # CPU backends get a mask of the drafts alone, GPU backends one that also has columns for the committed KV.
    needed = requests * drafts * drafts
    lens = forward_batch.seq_lens_cpu
    if mask.numel() != needed and lens is not None:
        needed += drafts * int(lens[:requests].sum())
    return None if mask.numel() >= needed else fallback_reasons.SPECULATIVE_TREE


def lens_after(host_lens: Int64Array, drafts: int) -> tuple[Int64Array, Int64Array]:
    """KV lengths with the drafts of a verify step, and its new tokens, by request."""
    return host_lens + drafts, np.full(len(host_lens), drafts, dtype=np.int64)
