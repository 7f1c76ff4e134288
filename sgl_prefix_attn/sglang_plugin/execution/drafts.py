"""Drafts of speculative decoding: what a verify step needs to know of SGLang's verify input.

Each request has n drafts behind its committed KV. In a chain a draft sees all drafts before it, as new tokens of a
prefill do. In a tree it sees its ancestors alone.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

# Drafts that a 64-bit mask can tell apart.
MOST_TREE_DRAFTS = 64


def is_chain(info: Any) -> bool:
    """Whether the drafts of each request are a chain. False also where only their mask can tell (NGRAM)."""
    return getattr(info, "topk", None) == 1


def unsupported_verify(forward_batch: Any, reads_trees: bool) -> str | None:
    """The reason why a verify step cannot run packed, None if it can.

    Args:
        forward_batch: SGLang's ForwardBatch.
        reads_trees: whether kernels read masks of visible drafts.
    """
    info = forward_batch.spec_info
    if getattr(info, "ragged_verify_layout", None) is not None:
        return fallback_reasons.SPECULATIVE
    if is_chain(info):
        return None
    drafts, mask = info.draft_token_num, info.custom_mask
    # A mask of another size also has columns for the committed KV; only GPU backends get it.
    fits = mask is not None and mask.numel() == forward_batch.batch_size * drafts * drafts
    return None if reads_trees and fits and drafts <= MOST_TREE_DRAFTS else fallback_reasons.SPECULATIVE_TREE


def visible_positions(info: Any) -> torch.Tensor | None:
    """Masks of the positions that the drafts of a verify step see, None for chains.

    Returns:
        [requests * drafts] int64, see `packed_attention`. Parents stand before their children, so no draft sees a
        position behind its own.
    """
    if is_chain(info):
        return None
    drafts = info.draft_token_num
    mask = info.custom_mask.view(-1, drafts, drafts).bool()
    draft, back = torch.arange(drafts).view(-1, 1), torch.arange(MOST_TREE_DRAFTS)
    sees = mask.gather(2, (draft - back).clamp(min=0).expand(mask.shape[0], -1, -1))
    sees |= back > draft  # committed KV
    return (sees.long() << back).sum(-1).flatten()
