"""Random batches for the executors: a plan, tensors, and the comparison with dense attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from tests.core.forests import KvPool, Path, materialise, random_paths
from tests.support.reference import reference_attention

GROUPS = [1, 2, 4, 5, 7, 8, 16]
HEAD_DIMS = [16, 32, 64, 80, 96, 128, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rounding of the output; the arithmetic is fp32 either way.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@dataclass
class Batch:
    plan: Plan
    pool: KvPool
    q: torch.Tensor
    query_lens: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> dict[str, Any]:
        pool = self.pool
        return {
            "req_to_token": pool.req_to_token,
            "req_pool_indices": pool.req_pool_indices,
            "seq_lens": pool.seq_lens,
            "scale": 1 / math.sqrt(self.q.shape[-1]),
            **self.options,
        }

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Into outputs and a workspace full of NaN: what is not written is seen."""
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full(self.q.shape[:2], torch.nan)
        options = {"workspace": poisoned_workspace(self.plan, self.q), **self.inputs(), **options}
        result = packed_attention(self.q, self.pool.k_cache, self.pool.v_cache, self.plan, out=out, lse=lse, **options)
        assert result is out
        return out, lse

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_attention(
            self.q, self.pool.k_cache, self.pool.v_cache, query_lens=self.query_lens.tolist(), **self.inputs()
        )


def poisoned_workspace(plan: Plan, q: torch.Tensor) -> PartialWorkspace:
    workspace = PartialWorkspace()
    workspace.reserve(plan.num_partials, q.shape[1], q.shape[2])
    workspace._buffer.fill_(torch.nan)
    return workspace


def make_batch(
    rng: np.random.Generator,
    paths: list[Path],
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    workers: int = 2,
    **options: Any,
) -> Batch:
    pool = materialise(rng, paths, seq_lens, kv_heads=kv_heads, head_dim=head_dim, dtype=kv_dtype)
    forest = PrefixForest.from_paths(paths, prefix_lens=(seq_lens - query_lens).tolist())
    shape = ModelShape(kv_heads * group, kv_heads, head_dim, kv_bytes=kv_dtype.itemsize)
    plan = Planner(shape, DeviceModel.cpu(workers)).plan(forest, seq_lens, query_lens)
    tokens = int(query_lens.sum())
    q = torch.from_numpy(rng.standard_normal((tokens, kv_heads * group, head_dim), dtype=np.float32)) * 2
    return Batch(plan, pool, q.to(dtype), query_lens, options)


def random_batch(rng: np.random.Generator, max_requests: int = 24, max_new_tokens: int = 1, **kwargs: Any) -> Batch:
    paths, seq_lens, query_lens = random_paths(
        rng, int(rng.integers(1, max_requests + 1)), int(rng.integers(1, 9)), max_new_tokens=max_new_tokens
    )
    return make_batch(rng, paths, seq_lens, query_lens, **kwargs)


def check(batch: Batch, **options: Any) -> None:
    out, lse = batch.run(**options)
    expected_out, expected_lse = batch.expected()
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)


def check_random(rng: np.random.Generator, isa: str, **options: Any) -> None:
    """A random forest, shape and variant; `options` as for random_batch."""
    batch = random_batch(
        rng, max_requests=int(rng.choice([1, 6, 24])), max_new_tokens=int(rng.choice([1, 1, 5, 70])),
        kv_heads=int(rng.integers(1, 4)), group=int(rng.choice(GROUPS)), head_dim=int(rng.choice(HEAD_DIMS)),
        workers=int(rng.integers(1, 5)), **options,
    )  # fmt: skip
    if rng.random() < 0.4:
        batch.options["window_left"] = int(rng.choice([0, 1, 7, 30, 200]))
    if rng.random() < 0.4:
        batch.options["logit_cap"] = float(rng.choice([0.5, 5.0, 50.0]))
    if rng.random() < 0.4:
        batch.options["sinks"] = torch.from_numpy(rng.normal(0, 4, batch.q.shape[1]).astype(np.float32))
    if rng.random() < 0.3:
        bits = rng.integers(-(2**63), 2**63, len(batch.q), dtype=np.int64) | 1
        batch.options["visible"] = torch.from_numpy(bits)
    check(batch, isa=isa, threads=int(rng.integers(1, 4)))


def refused(batch: Batch, message: str, error: type[Exception] = ValueError, **changes: Any) -> None:
    """The executor refuses the batch once these arguments have changed."""
    arguments = {
        "q": batch.q, "k_cache": batch.pool.k_cache, "v_cache": batch.pool.v_cache, "plan": batch.plan,
        **batch.inputs(), **changes,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        packed_attention(**arguments)
