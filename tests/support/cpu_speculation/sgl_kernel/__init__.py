"""The CPU functions of `sgl_kernel` that speculative decoding calls, on tensors. Others raise when they are called.

Argument names are those of SGLang's calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

__version__ = "0.0.0+cpu.tests"


def _spans(starts: Tensor, ends: Tensor) -> list[tuple[int, int]]:
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, context: int
) -> None:
    """The slots of positions [start, end) of each request, one request after the other."""
    rows = req_pool_indices.tolist()
    found = [req_to_token[row, a:b] for row, (a, b) in zip(rows, _spans(start, end), strict=True)]
    slots = torch.cat(found)
    out[: slots.numel()] = slots


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, context: int
) -> None:
    """Writes slots to positions [start, end) of each request."""
    used = 0
    for row, (a, b) in zip(req_pool_indices.tolist(), _spans(start, end), strict=True):
        req_to_token[row, a:b] = out_cache_loc[used : used + b - a]
        used += b - a


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, context: int, topk: int, steps: int
) -> None:
    """The slots behind each request's KV that its drafts use."""
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, seq_lens + topk * steps, out, context)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    tokens = accept_tokens.view(-1, stride)
    bonus_tokens.copy_(tokens.gather(1, accept_lens.view(-1, 1).long() - 1).squeeze(1))


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """The slots of the accepted drafts, without gaps."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Moves KV from slots to slots, in each buffer."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * stride, row, stride)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor, selected: Tensor, seq_lens: Tensor, tree_mask: Tensor, positions: Tensor,
    retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    topk: int, steps: int, drafts: int, mode: Any,
) -> None:  # fmt: skip
    """The tree of drafts with topk 1: a chain."""
    if topk != 1:
        raise NotImplementedError(f"trees with topk {topk}")
    count, order = seq_lens.shape[0], torch.arange(drafts)
    positions.copy_((seq_lens.view(-1, 1) + order).flatten())
    retrieve_index.copy_(torch.arange(count * drafts).view(count, drafts))
    retrieve_next_token.copy_(torch.where(order < drafts - 1, order + 1, -1).expand(count, drafts))
    retrieve_next_sibling.fill_(-1)
    tree_mask.view(count, drafts, drafts).copy_(torch.ones(drafts, drafts, dtype=torch.bool).tril())


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Follows the target's tokens down each request's tree. `predicts` gets them, `accept_index` the nodes."""
    predicted = target_predict.flatten()
    for request in range(candidates.shape[0]):
        nodes = retrive_index[request].tolist()
        children, siblings = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        at, accepted = 0, 0
        accept_index[request, 0] = nodes[0]
        while accepted + 1 < accept_index.shape[1]:
            wanted = int(predicted[nodes[at]])
            child = children[at]
            while child >= 0 and int(candidates[request, child]) != wanted:
                child = siblings[child]
            if child < 0:
                break
            predicts[nodes[at]] = wanted
            at, accepted = child, accepted + 1
            accept_index[request, accepted] = nodes[at]
        accept_token_num[request] = accepted
        predicts[nodes[at]] = predicted[nodes[at]]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(name)

    return unavailable
