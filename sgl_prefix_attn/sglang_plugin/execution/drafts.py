"""Drafts of speculative decoding: what a verify step needs to know of SGLang's verify input.

Each request has n drafts behind its committed KV. In a chain a draft sees all drafts before it, as new tokens of a
prefill do. In a tree it sees its ancestors alone.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

# Drafts that a 64-bit mask can tell apart.
MOST_TREE_DRAFTS = 64


def is_chain(info: Any) -> bool:
    """Whether the drafts of each request are a chain. False also where only their mask can tell (NGRAM)."""
    return getattr(info, "topk", None) == 1


def unsupported_server(runner: Any, reads_trees: bool) -> str | None:
    """The reason why a GPU server's verify steps cannot run packed, None if they can or if it has none.

    A packed graph has no fallback for a step whose drafts no kernel can tell apart, so this is known beforehand.

    Args:
        runner: SGLang's ModelRunner.
        reads_trees: whether kernels read masks of visible drafts.
    """
    if not versions.speculates(runner):
        return None
    if not versions.has_uniform_drafts(runner):
        return fallback_reasons.SPECULATIVE
    drafts = versions.drafts_of(runner)
    if versions.has_draft_chains(runner) or (reads_trees and drafts <= MOST_TREE_DRAFTS):
        return None
    return fallback_reasons.SPECULATIVE_TREE


def unsupported_verify(forward_batch: Any, requests: int, reads_trees: bool) -> str | None:
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


def visible_positions(info: Any, seq_lens: torch.Tensor) -> torch.Tensor | None:
    """Masks of the positions that the drafts of a verify step see, None for chains. Does not wait for the device.

    Args:
        info: SGLang's verify input.
        seq_lens: [requests] int64 committed KV lengths, on the mask's device.

    Returns:
        [requests * drafts] int64, see `packed_attention`. Parents stand before their children, so no draft sees a
        position behind its own.
    """
    if is_chain(info):
        return None
    drafts, requests = info.draft_token_num, seq_lens.shape[0]
    mask = info.custom_mask.flatten()
    columns, committed = _places(drafts, mask.device)
    if mask.numel() == requests * drafts * drafts:
        sees = mask.view(requests, drafts, drafts).bool().gather(2, columns.expand(requests, -1, -1))
    else:
        # Row i of a request has a column for each of its committed positions, then one for each draft.
        width = (seq_lens + drafts).view(-1, 1, 1)
        ends = (drafts * width).cumsum(0)
        rows = ends - width * _rows_behind(drafts, mask.device)
        sees = mask[(rows + seq_lens.view(-1, 1, 1) + columns).clamp(max=mask.numel() - 1)].bool()
    return ((sees | committed).long() << _shifts(mask.device)).sum(-1).flatten()


@functools.lru_cache(maxsize=8)
def _places(drafts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """By draft and bit of its mask: the draft that the bit stands for, or 0; and whether it stands for committed KV."""
    draft, back = torch.arange(drafts, device=device).view(-1, 1), _shifts(device)
    return (draft - back).clamp(min=0), back > draft


@functools.lru_cache(maxsize=8)
def _rows_behind(drafts: int, device: torch.device) -> torch.Tensor:
    """[drafts, 1] rows of a request's mask from this one to the end."""
    return torch.arange(drafts, 0, -1, device=device).view(-1, 1)


@functools.lru_cache(maxsize=4)
def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(MOST_TREE_DRAFTS, device=device)


def lens_after(host_lens: Int64Array, drafts: int) -> tuple[Int64Array, Int64Array]:
    """KV lengths with the drafts of a verify step, and its new tokens, by request."""
    return host_lens + drafts, np.full(len(host_lens), drafts, dtype=np.int64)
