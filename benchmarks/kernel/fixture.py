"""The KV pool that all cases share, the tensors of one case, and dense attention as the reference."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from benchmarks.workloads.case import KV_BYTES, Case, Heads

# Types of the KV pool by name. Scales of fp8 are 1: noise needs no others.
KV_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
assert KV_DTYPES.keys() == KV_BYTES.keys()
FILL_ELEMENTS = 1 << 27


class KvPool:
    """K and V noise, allocated once for all cases of a type, whatever their heads.

    Args:
        elements: of K and of V: the most that `view` is asked for.
    """

    def __init__(self, elements: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.k = torch.empty(elements, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        for cache in (self.k, self.v):
            for part in cache.split(FILL_ELEMENTS):
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=device))

    def view(self, slots: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [slots, kv_heads, head_dim], the front of the pool."""
        count = slots * kv_heads * head_dim
        return self.k[:count].view(slots, kv_heads, head_dim), self.v[:count].view(slots, kv_heads, head_dim)


def pool_elements(cases: Iterable[Case]) -> int:
    """Elements of K that the largest of these cases needs."""
    return max(case.unique_tokens * case.heads[1] * case.head_dim for case in cases)


class Fixture:
    """Tensors of one case: its slots stand in random order in the front of the pool.

    Attributes:
        table: int32 [requests, longest], KV slot of every position; also req_to_token, row r for request r.
        lens: int32 [requests]; lens64 the same as int64.
        kv_indptr, kv_indices: int32, the table without its padding.
        out: bf16 [requests, q_heads, head_dim], poisoned before checks.
    """

    def __init__(self, case: Case, pool: KvPool, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        self.heads: Heads = case.heads
        generator = torch.Generator(device).manual_seed(seed)
        count = case.unique_tokens
        order = torch.randperm(count, generator=generator, device=device, dtype=torch.int32)
        logical = torch.from_numpy(case.table()).to(device)
        self.head_dim, self.scale = case.head_dim, case.head_dim**-0.5
        self.k, self.v = pool.view(count, case.heads[1], case.head_dim)
        self.kv_dtype = pool.k.dtype
        self.lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
        self.lens64 = self.lens.long()
        inside = torch.arange(logical.shape[1], device=device)[None] < self.lens[:, None]
        self.table = torch.where(inside, order[logical.long()], 0).to(torch.int32)
        self.kv_indices = self.table[inside]
        self.kv_indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)).to(device)
        self.rows = torch.arange(len(case.paths), device=device)
        shape = (len(case.paths), case.heads[0], case.head_dim)
        self.q = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        self.out = torch.full_like(self.q, torch.nan)

    def slots_of(self, ranges: list[tuple[int, int, int]]) -> torch.Tensor:
        """int32 KV slots of (request, begin, end) position ranges, one after the other."""
        return torch.cat([self.table[request, begin:end] for request, begin, end in ranges])

    def padded(self, ranges: list[tuple[int, int, int]]) -> torch.Tensor:
        """int32 [len(ranges), longest] KV slots of position ranges, 0 beyond the end of each."""
        width = max(1, *(end - begin for _, begin, end in ranges))
        table = torch.zeros(len(ranges), width, dtype=torch.int32, device=self.device)
        for row, (request, begin, end) in enumerate(ranges):
            table[row, : end - begin] = self.table[request, begin:end]
        return table

    def dense(self, request: int, block: int = 8192) -> torch.Tensor:
        """float32 [q_heads, head_dim]: attention of one request's query, block after block of KV in float32."""
        q_heads, kv_heads = self.heads
        q = self.q[request].float().view(kv_heads, q_heads // kv_heads, self.head_dim) * self.scale
        top = torch.full(q.shape[:2], -torch.inf, device=self.device)
        total, acc = torch.zeros_like(top), torch.zeros_like(q)
        for part in self.table[request, : self.case.seq_lens[request]].long().split(block):
            scores = torch.einsum("hgd,lhd->hgl", q, rows(self.k, part))
            new_top = torch.maximum(top, scores.amax(-1))
            weights = torch.exp(scores - new_top[..., None])
            shrink = torch.exp(top - new_top)
            total = total * shrink + weights.sum(-1)
            acc = acc * shrink[..., None] + torch.einsum("hgl,lhd->hgd", weights, rows(self.v, part))
            top = new_top
        return (acc / total[..., None]).view(q_heads, self.head_dim)


def rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 rows of a cache of any type; torch gathers no float8."""
    if cache.dtype is torch.float8_e4m3fn:
        return cache.view(torch.uint8)[slots].view(cache.dtype).float()
    return cache[slots].float()


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; NaN stays NaN."""
    expected = expected.float()
    return ((result.float() - expected).norm() / expected.norm()).item()
