"""Random ragged batches, and the tensors that a server would hold for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

Path = list[tuple[int, int, int]]


def random_paths(
    rng: np.random.Generator,
    num_requests: int,
    levels: int,
    *,
    max_node_tokens: int = 40,
    max_tail_tokens: int = 40,
    max_new_tokens: int = 1,
) -> tuple[list[Path], np.ndarray, np.ndarray]:
    """A ragged forest: several roots, up to `levels` nodes on a path, requests leaving anywhere, some without a path.

    Returns:
        paths ((node id, start, end) segments per request), seq_lens and query_lens (int64). A path ends at or before
        seq_len - query_len; with max_new_tokens 1 every request brings one token, else about half of them do.
    """
    nodes: list[Path] = [[]]
    leaves: list[Path] = [[]]
    spread = rng.uniform(0.2, 1.0)  # few nodes: much sharing; many: little
    for node in range(max(1, round(num_requests * spread)) if levels else 0):
        # Preferring the newest nodes makes deep forests, as conversations do.
        newest_first = rng.random() < 0.5
        parent = nodes[-1] if newest_first else nodes[int(rng.integers(len(nodes)))]
        if len(parent) >= levels:
            parent = []
        begin = parent[-1][2] if parent else 0
        length = int(rng.choice([1, int(rng.integers(1, max_node_tokens + 1)), max_node_tokens]))
        path = [*parent, (node, begin, begin + length)]
        nodes.append(path)
        leaves.append(path)
    paths = [leaves[int(rng.integers(len(leaves)))] for _ in range(num_requests)]
    query_lens = np.ones(num_requests, dtype=np.int64)
    if max_new_tokens > 1:
        extends = rng.random(num_requests) < 0.5
        query_lens[extends] = rng.integers(1, max_new_tokens + 1, int(extends.sum()))
    ends = np.array([path[-1][2] if path else 0 for path in paths], dtype=np.int64)
    tails = rng.integers(0, max_tail_tokens + 1, num_requests) * (rng.random(num_requests) < 0.8)
    return paths, ends + tails + query_lens, query_lens


@dataclass
class KvPool:
    """req_to_token and KV cache of a batch. Whatever no request's position owns is NaN, or names a NaN slot."""

    req_to_token: torch.Tensor  # int32 [rows, context]
    req_pool_indices: torch.Tensor  # int64 [requests]
    seq_lens: torch.Tensor  # int64 [requests]
    k_cache: torch.Tensor  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor

    def slots_of(self, request: int) -> torch.Tensor:
        row = self.req_to_token[self.req_pool_indices[request]]
        return row[: int(self.seq_lens[request])].long()

    def poison_all_but(self, slots: torch.Tensor) -> None:
        keep = torch.zeros(len(self.k_cache), dtype=torch.bool)
        keep[slots] = True
        for cache in (self.k_cache, self.v_cache):
            if cache.dtype == torch.float8_e4m3fn:  # masks are not implemented for it
                cache.view(torch.uint8)[~keep] = 0x7F
            else:
                cache[~keep] = torch.nan


def materialise(
    rng: np.random.Generator,
    paths: Sequence[Path],
    seq_lens: np.ndarray,
    *,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    context: int = 0,
) -> KvPool:
    """Gives every node and every private position slots from one random permutation, and fills them with noise.

    context: least length of rows. Behind its tokens a row has a slot of NaN.
    Rows are stored with gaps between heads and between slots, so that strides matter.
    """
    num_requests, context, spare_rows, spare_slots = len(paths), max(context, int(seq_lens.max())) + 5, 3, 7
    lengths = {node: end - begin for path in paths for node, begin, end in path}
    private = int(seq_lens.sum()) - sum(path[-1][2] for path in paths if path)
    used = sum(lengths.values()) + private
    free = rng.permutation(used + spare_slots).astype(np.int32)
    nowhere = int(free[-1])  # a spare slot
    node_slots: dict[int, np.ndarray] = {}
    taken = 0
    for node, length in lengths.items():
        node_slots[node] = free[taken : taken + length]
        taken += length
    rows = rng.permutation(num_requests + spare_rows)[:num_requests]
    req_to_token = np.full((num_requests + spare_rows, context), nowhere, dtype=np.int32)
    for request, path in enumerate(paths):
        row, end = req_to_token[rows[request]], 0
        for node, begin, end in path:
            row[begin:end] = node_slots[node]
        tail = int(seq_lens[request]) - end
        row[end : end + tail] = free[taken : taken + tail]
        taken += tail
    assert taken == used
    pool = KvPool(
        torch.from_numpy(req_to_token),
        torch.from_numpy(rows.astype(np.int64)),
        torch.from_numpy(seq_lens.astype(np.int64)),
        _noise(rng, used + spare_slots, kv_heads, head_dim, dtype),
        _noise(rng, used + spare_slots, kv_heads, head_dim, dtype),
    )
    pool.poison_all_but(torch.from_numpy(free[:used].astype(np.int64)))
    return pool


def _noise(rng: np.random.Generator, slots: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    storage = torch.full((slots, heads + 1, head_dim + 16), torch.nan, dtype=dtype)
    view = storage[:, :heads, :head_dim]
    view.copy_(torch.from_numpy(rng.standard_normal((slots, heads, head_dim), dtype=np.float32)))
    return view
