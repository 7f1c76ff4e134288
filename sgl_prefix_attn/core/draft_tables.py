"""KV lengths and masks of verify steps of speculative decoding.

SGLang's mask of a tree of drafts has a row for each draft of each request, one behind the other. On GPUs a row has a
column for each position of the request's KV, on CPUs for its drafts alone. Attention takes one word for each draft.
"""

from __future__ import annotations

import functools

import torch

from sgl_prefix_attn import _native

# Drafts that a 64-bit mask can tell apart.
MOST_TREE_DRAFTS = 64


def visible_words(mask: torch.Tensor | None, committed: torch.Tensor, drafts: int) -> torch.Tensor:
    """Masks of the positions that the drafts of each request see, in torch operations.

    Args:
        mask: [*] bool, SGLang's. What it does not cover is visible; None: everything.
        committed: [requests] int64 KV lengths without the drafts, on the mask's device.
        drafts: of each request, at most `MOST_TREE_DRAFTS`. Parents stand before their children, so no draft sees a
            position behind its own.

    Returns:
        [requests * drafts] int64, see `packed_attention`.
    """
    requests = committed.shape[0]
    if mask is None or mask.numel() == 0:
        return committed.new_full((requests * drafts,), -1)
    mask = mask.flatten()
    columns, is_committed = _places(drafts, mask.device)
    row = torch.arange(drafts, device=mask.device).view(-1, 1)
    if _has_committed_columns(mask, requests, drafts):
        width = (committed + drafts).view(-1, 1, 1)
        begin = (drafts * width).cumsum(0) - width * (drafts - row) + committed.view(-1, 1, 1)
    else:
        begin = (torch.arange(requests, device=mask.device).view(-1, 1, 1) * drafts + row) * drafts
    at = begin + columns
    sees = mask[at.clamp(max=mask.numel() - 1)].bool() | is_committed | (at >= mask.numel())
    return (sees.long() << _shifts(mask.device)).sum(-1).flatten()


def _has_committed_columns(mask: torch.Tensor, requests: int, drafts: int) -> bool:
    # Committed KV is never empty, so a mask with its columns is larger.
    return mask.numel() != requests * drafts * drafts


def _as_bytes(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A mask as the kernel reads it, a byte for each column: the tensor itself if it is so.

    SGLang's are of bool, with Triton as stock backend of uint8: a buffer for the longest context of the largest batch.
    """
    return (mask if mask.element_size() == 1 else mask.bool()).to(device).contiguous()


@functools.lru_cache(maxsize=8)
def _places(drafts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft, by draft and bit of its mask, that the bit stands for, or 0; and whether it is of committed KV."""
    draft, back = torch.arange(drafts, device=device).view(-1, 1), _shifts(device)
    return (draft - back).clamp(min=0), back > draft


@functools.lru_cache(maxsize=4)
def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(MOST_TREE_DRAFTS, device=device)


class DraftTables:
    """Memory for the KV lengths and masks of a verify step at fixed addresses. On a GPU one launch fills it.

    Args:
        requests: most rows of a batch, those that a graph pads included.
        drafts: most drafts of a request.
        device: of the tables.
    """

    def __init__(self, requests: int, drafts: int, device: torch.device) -> None:
        self._device = device
        self._seq_lens = torch.zeros(requests, dtype=torch.int64, device=device)
        self._visible = torch.zeros(requests * drafts, dtype=torch.int64, device=device)

    def fill(
        self, committed: torch.Tensor, requests: int, drafts: int, *, trees: bool, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tables of a step. They stay until the next call; work goes to PyTorch's current stream.

        Args:
            committed: [rows] contiguous int64 KV lengths without the drafts.
            requests: rows that are requests of the batch.
            drafts: of each request.
            trees: whether drafts are trees; False: chains, which need no mask.
            mask: see `visible_words`.

        Returns:
            [rows] KV lengths with the drafts; [requests * drafts] masks, None for chains.

        Raises:
            ValueError: more rows or drafts than there is memory for.
        """
        rows, tokens = committed.shape[0], requests * drafts
        if rows > len(self._seq_lens) or (trees and tokens > len(self._visible)):
            raise ValueError(
                f"{rows} requests with {drafts} drafts each; there is memory for {len(self._seq_lens)} requests and "
                f"{len(self._visible)} drafts"
            )
        seq_lens = self._seq_lens[:rows]
        if not trees:
            return torch.add(committed, drafts, out=seq_lens), None
        visible = self._visible[:tokens]
        if self._device.type != "cuda":
            torch.add(committed, drafts, out=seq_lens)
            return seq_lens, visible.copy_(visible_words(mask, committed[:requests], drafts))
        if mask is not None:
            mask = _as_bytes(mask, committed.device)
        _native.cuda_draft_tables(
            committed=committed.data_ptr(),
            mask=0 if mask is None else mask.data_ptr(),
            mask_size=0 if mask is None else mask.numel(),
            rows=rows,
            requests=requests,
            drafts=drafts,
            has_committed_columns=mask is not None and _has_committed_columns(mask, requests, drafts),
            seq_lens=seq_lens.data_ptr(),
            visible=visible.data_ptr(),
            stream=torch.cuda.current_stream(self._device).cuda_stream,
        )
        return seq_lens, visible
