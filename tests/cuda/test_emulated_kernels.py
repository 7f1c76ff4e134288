"""The GPU kernels' own code, run on a CPU lane by lane, against dense attention.

What this shows: indices, masks, fragments, swizzles, the ring of stages and its waits, slots, merges, the queue. What
only a GPU shows: speed, memory ordering, that the compiler and the hardware agree with the emulated instructions.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.core.reference import reference_attention
from tests.core.forests import materialise, random_paths

GROWTH = 5


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def run_both(
    emulation: ModuleType,
    seed: int,
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    requests: int = 6,
    levels: int = 3,
    tokens: int = 90,
    max_new_tokens: int = 1,
    grown: int = 0,
    workers: int = 3,
    logit_cap: float = 0.0,
    window_left: int = -1,
    with_sinks: bool = False,
    late_copies: bool = True,
    paths_and_lens: tuple[Any, np.ndarray, np.ndarray] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse) of the emulated kernels and of the reference for a random ragged batch."""
    rng = np.random.default_rng(seed)
    paths, planned_lens, query_lens = paths_and_lens or random_paths(
        rng, requests, levels, max_node_tokens=tokens, max_tail_tokens=tokens, max_new_tokens=max_new_tokens
    )
    seq_lens = planned_lens + grown
    q_heads, kv_heads = heads
    pool = materialise(rng, paths, seq_lens, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    q = torch.from_numpy(rng.standard_normal((int(query_lens.sum()), q_heads, head_dim))).to(dtype)
    sinks = torch.from_numpy(rng.standard_normal(q_heads)).float() if with_sinks else None
    forest = PrefixForest.from_paths(paths, prefix_lens=(planned_lens - query_lens).tolist())
    device = DeviceModel.gpu(1, max_tile_rows=64 if head_dim > 128 else 128)
    planner = Planner(ModelShape(q_heads, kv_heads, head_dim, partial_bytes=4), device)
    plan = planner.plan(forest, planned_lens, None if max_new_tokens == 1 and not paths_and_lens else query_lens)
    out = torch.full_like(q, torch.nan)
    lse = torch.full((len(q), q_heads), torch.nan)
    emulation.attention(
        plan, bits(q), bits(pool.k_cache), bits(pool.v_cache), bits(out), lse.numpy(), pool.req_to_token.numpy(),
        pool.req_pool_indices.numpy(), planned_lens, seq_lens, growth=GROWTH, scale=head_dim**-0.5,
        logit_cap=logit_cap, window_left=window_left, sinks=None if sinks is None else sinks.numpy(),
        bfloat16=dtype == torch.bfloat16, blocks=workers, late_copies=late_copies,
    )
    expected, expected_lse = reference_attention(
        q, pool.k_cache, pool.v_cache, req_to_token=pool.req_to_token, req_pool_indices=pool.req_pool_indices,
        seq_lens=pool.seq_lens, query_lens=torch.from_numpy(query_lens), scale=head_dim**-0.5, logit_cap=logit_cap,
        window_left=window_left, sinks=sinks,
    )
    return out, lse, expected, expected_lse


def check(out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor) -> None:
    # Weights and outputs are rounded to 16 bits: about three significant digits.
    tolerance = 2e-2 if out.dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (16, 1), (5, 1), (14, 2)], ids=str)
def test_decode_of_ragged_forests(emulation: ModuleType, heads: tuple[int, int], late_copies: bool) -> None:
    check(*run_both(emulation, seed=heads[0], heads=heads, late_copies=late_copies))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_sizes_and_types(emulation: ModuleType, head_dim: int, dtype: torch.dtype) -> None:
    check(*run_both(emulation, seed=head_dim, head_dim=head_dim, dtype=dtype, requests=4))


@pytest.mark.parametrize("queries", [1, 3, 5, 9, 17, 20])
def test_every_tile_of_the_table(emulation: ModuleType, queries: int) -> None:
    """`queries` requests of group 8 share one node: 8 .. 160 rows, so tiles of 16, 32, 64, 128 and 128 + 32."""
    paths = [[(0, 0, 200)]] * queries
    ones = np.ones(queries, dtype=np.int64)
    lens = 200 + np.arange(1, queries + 1, dtype=np.int64)
    check(*run_both(emulation, seed=queries, heads=(8, 1), paths_and_lens=(paths, lens, ones)))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 600])
def test_lengths_around_the_kv_tile(emulation: ModuleType, length: int) -> None:
    lens = np.array([length, 1], dtype=np.int64)
    check(*run_both(emulation, seed=length, heads=(4, 1), paths_and_lens=([[], []], lens, np.ones(2, dtype=np.int64))))


@pytest.mark.parametrize("seed", range(4))
def test_extend_over_a_shared_prefix_and_mixed_batches(emulation: ModuleType, seed: int) -> None:
    check(*run_both(emulation, seed=seed, heads=(4, 2), max_new_tokens=70))


def test_a_plan_is_replayed_with_longer_tails(emulation: ModuleType) -> None:
    check(*run_both(emulation, seed=3, grown=GROWTH))


@pytest.mark.parametrize("window", [0, 7, 64, 100])
def test_sliding_window(emulation: ModuleType, window: int) -> None:
    check(*run_both(emulation, seed=window, window_left=window, max_new_tokens=20))


def test_soft_cap(emulation: ModuleType) -> None:
    check(*run_both(emulation, seed=1, logit_cap=3.0))


def test_sinks(emulation: ModuleType) -> None:
    check(*run_both(emulation, seed=2, with_sinks=True))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_same_bits_whoever_takes_what_from_the_queue(emulation: ModuleType, workers: int) -> None:
    one = run_both(emulation, seed=9, workers=1, requests=8)
    many = run_both(emulation, seed=9, workers=workers, requests=8)
    assert torch.equal(one[0].view(torch.int16), many[0].view(torch.int16))
    assert torch.equal(one[1], many[1])
