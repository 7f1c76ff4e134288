"""Random batches for the GPU kernels, emulated or real, and what dense attention says of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from tests.core.forests import KvPool, Path, materialise, random_paths
from tests.support.reference import reference_attention

Result = tuple[torch.Tensor, torch.Tensor]
Batch = tuple[list[Path], np.ndarray, np.ndarray]  # paths, lengths, new tokens


@dataclass
class Case:
    """One step of one layer.

    planned_lens: what the plan was made for; the step's own lengths are `pool.seq_lens`.
    visible: [tokens] int64 masks of a tree of drafts, see `packed_attention`; None: each query sees all before it.
    """

    plan: Plan
    shape: ModelShape
    q: torch.Tensor
    pool: KvPool
    planned_lens: np.ndarray
    variant: dict[str, Any]
    query_lens: np.ndarray
    visible: torch.Tensor | None = None

    @functools.cached_property
    def expected(self) -> Result:
        """(out, lse) of dense fp64 attention."""
        return dense_attention(self.q, self.pool, self.query_lens, visible=self.visible, **self.variant)


def make_case(
    seed: int,
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    v_scale: float = 1.0,
    requests: int = 6,
    levels: int = 3,
    tokens: int = 90,
    max_new_tokens: int = 1,
    grown: int = 0,
    num_sms: int = 1,
    logit_cap: float = 0.0,
    window_left: int = -1,
    with_sinks: bool = False,
    sink_offset: float = 0.0,
    eager: bool = True,
    bandwidth: float | None = None,
    trees: bool = False,
    batch: Batch | None = None,
) -> Case:
    """A random ragged batch, or `batch`, with its plan.

    kv_dtype: None for dtype. grown: tokens by which requests are longer than planned, or shorter. bandwidth: of the
    device that is planned for, in bytes per second; None for its own.
    trees: new tokens are random trees of drafts, with at most 64 tokens a request.
    """
    rng = np.random.default_rng(seed)
    paths, planned_lens, query_lens = batch or random_paths(
        rng, requests, levels, max_node_tokens=tokens, max_tail_tokens=tokens, max_new_tokens=max_new_tokens
    )
    q_heads, kv_heads = heads
    stored = kv_dtype or dtype
    shape = ModelShape(q_heads, kv_heads, head_dim, kv_bytes=stored.itemsize)
    pool = materialise(
        rng, paths, planned_lens + grown, kv_heads=kv_heads, head_dim=head_dim, dtype=stored,
        context=int(planned_lens.max()),
    )  # fmt: skip
    q = torch.from_numpy(rng.standard_normal((int(query_lens.sum()), q_heads, head_dim))).to(dtype)
    forest = PrefixForest.from_paths(paths, prefix_lens=(planned_lens - query_lens).tolist())
    device = DeviceModel.gpu(num_sms, head_dim=head_dim, group=q_heads // kv_heads)
    # Warps are as fast as CTAs, so that few tails are for warps too.
    device = replace(device, overlap=0.0, lone_speedup=1.0, narrow_to_fill=1)
    # Small batches too are packed as if reading KV was all that counts: more levels, more combines. And warps take
    # tails of any length.
    if eager:
        device = replace(device, item_overhead=0.0, bandwidth=1e9, narrow_parts=1, narrow_overhead=0.0)
    if bandwidth is not None:
        device = replace(device, bandwidth=bandwidth)
    decode = bool((query_lens == 1).all())
    plan = Planner(shape, device).plan(forest, planned_lens, None if decode else query_lens)
    variant = {
        "scale": head_dim**-0.5,
        "v_scale": v_scale,
        "logit_cap": logit_cap,
        "window_left": window_left,
        "sinks": torch.from_numpy(rng.standard_normal(q_heads) + sink_offset).float() if with_sinks else None,
    }
    visible = torch.cat([random_tree(rng, int(count)) for count in query_lens]) if trees else None
    return Case(plan, shape, q, pool, planned_lens, variant, query_lens, visible)


def dense_attention(q: torch.Tensor, pool: KvPool, query_lens: np.ndarray, **options: Any) -> Result:
    """By a GPU if there is one: the largest cases take a CPU minutes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_device = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    out, lse = reference_attention(
        q.to(device), pool.k_cache.to(device), pool.v_cache.to(device), req_to_token=pool.req_to_token.to(device),
        req_pool_indices=pool.req_pool_indices, seq_lens=pool.seq_lens, query_lens=query_lens.tolist(), **on_device,
    )  # fmt: skip
    return out.cpu(), lse.cpu()


def decode_batch(lens: Sequence[int] | np.ndarray, shared: int = 0, new: int = 1) -> Batch:
    """Requests that have their first `shared` tokens in common; each brings `new` tokens."""
    return [[(0, 0, shared)] if shared else []] * len(lens), np.array(lens, np.int64), np.full(len(lens), new, np.int64)


def document(
    requests: int, tokens: int, *, heads: tuple[int, int] = (8, 1), num_sms: int = 132, **options: Any
) -> Case:
    """Decode of `requests` on one document, split for many CTAs; each has a short tail."""
    batch = decode_batch(tokens + 1 + 3 * np.arange(requests), tokens)
    return make_case(tokens, heads=heads, batch=batch, num_sms=num_sms, **options)


def splits_of(case: Case) -> int:
    """Most KV splits of an item's queries."""
    return int(np.unique(case.plan.items[:, 0], return_counts=True)[1].max())


def random_tree(rng: np.random.Generator, drafts: int) -> torch.Tensor:
    """Masks of drafts of which each sees itself, its ancestors and the committed KV; parents stand before children."""
    words: list[int] = []
    for draft in range(drafts):
        back = int(rng.integers(1, draft + 1)) if draft else 0  # of the parent
        committed = 2**64 - (1 << draft + 1)
        words.append((1 | (words[draft - back] << back if draft else 0) | committed) & 2**64 - 1)
    return torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))


def same(one: Result, other: Result) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


def check(case: Case, result: Result) -> None:
    """Weights and outputs are rounded to 16 bits: about three significant digits."""
    out, lse = result
    tolerance = 2e-2 if out.dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(out.double().cpu(), case.expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), case.expected[1], atol=1e-3, rtol=1e-3)
