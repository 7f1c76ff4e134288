"""What `packed_attention` refuses, and that the message names the argument and the value."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from tests.core.batches import Batch, make_batch, refused


@pytest.fixture
def batch() -> Batch:
    lens = np.array([9, 14, 5, 40, 7, 8], dtype=np.int64)
    return make_batch(np.random.default_rng(0), [[(0, 0, 4)]] * 6, lens, np.ones_like(lens))


def test_disagreeing_shapes_are_named(batch: Batch) -> None:
    tokens, heads, head_dim = batch.q.shape
    refused(batch, "q has head_dim 48 but k_cache has 32", q=torch.zeros(tokens, heads, 48))
    refused(batch, "q has 3 heads, which is no multiple of the 2 heads of k_cache", q=torch.zeros(tokens, 3, head_dim))
    refused(batch, r"q has shape .* expected \[tokens, q_heads, head_dim\]", q=batch.q.flatten(1))
    refused(batch, "v_cache has shape", v_cache=batch.pool.v_cache[:-1])
    refused(batch, "out has shape", out=torch.zeros(tokens + 1, heads, head_dim))
    refused(batch, "lse has shape", lse=torch.zeros(heads, tokens))
    refused(batch, "sinks has shape", sinks=torch.zeros(heads + 1))
    refused(batch, "visible has 5 entries; expected 6", visible=torch.zeros(tokens - 1, dtype=torch.int64))
    rows = torch.zeros(99, dtype=torch.int64)
    refused(batch, "the plan is for", seq_lens=rows + 1, req_pool_indices=rows)
    refused(batch, "req_pool_indices has 1 entries", req_pool_indices=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_head_dim_must_be_a_multiple_of_16_up_to_256(batch: Batch, head_dim: int) -> None:
    cache = torch.zeros(4, 2, head_dim)
    refused(batch, f"head_dim is {head_dim}", q=torch.zeros(6, 4, head_dim), k_cache=cache, v_cache=cache)


def test_wrong_dtypes_are_named(batch: Batch) -> None:
    pool, cache = batch.pool, batch.pool.k_cache.to(torch.uint8)
    wrong = partial(refused, batch, error=TypeError)
    wrong(r"q has dtype torch.float64", q=batch.q.double())
    wrong(r"k_cache has dtype torch.uint8", k_cache=cache, v_cache=cache)
    wrong(r"v_cache has dtype torch.bfloat16 but k_cache has torch.float32", v_cache=pool.v_cache.bfloat16())
    wrong(r"out has dtype torch.float16 but q has torch.float32", out=batch.q.half())
    wrong(r"req_to_token has dtype torch.int64; expected torch.int32", req_to_token=pool.req_to_token.long())
    wrong(r"seq_lens has dtype torch.int32; expected torch.int64", seq_lens=pool.seq_lens.int())
    wrong(r"lse has dtype torch.float16", lse=batch.q[:, :, 0].half())


def test_innermost_strides_must_be_one(batch: Batch) -> None:
    refused(batch, "k_cache has strides", k_cache=batch.pool.k_cache.transpose(1, 2).contiguous().transpose(1, 2))
    refused(batch, "req_to_token has strides", req_to_token=batch.pool.req_to_token.T.contiguous().T)


def test_tensors_elsewhere_are_refused(batch: Batch) -> None:
    refused(batch, "q is on meta; packed_attention runs on CPU and CUDA tensors", q=batch.q.to("meta"))
    refused(batch, "k_cache is on meta but q is on cpu", k_cache=batch.pool.k_cache.to("meta"))
    refused(batch, "seq_lens is on meta but q is on cpu", seq_lens=batch.pool.seq_lens.to("meta"))
    refused(batch, "lse is on meta but q is on cpu", lse=torch.zeros(batch.q.shape[:2], device="meta"))


def test_indices_that_lead_outside_are_named(batch: Batch) -> None:
    pool, rows = batch.pool, len(batch.pool.req_to_token)
    indices = pool.req_pool_indices.clone()
    indices[1] = rows
    refused(batch, f"request 1: req_pool_indices is {rows}, .* below {rows}", req_pool_indices=indices)
    refused(batch, "request 0: seq_lens is", seq_lens=pool.seq_lens + 1000)
    refused(batch, "request 0: seq_lens is -", seq_lens=pool.seq_lens - 10000)
    refused(batch, "position is -1", seq_lens=torch.zeros_like(pool.seq_lens))
    refused(batch, r"query \d+: row of q is", q=batch.q[:-1])
    for stray in (len(pool.k_cache), -1):
        table = pool.req_to_token.clone()
        position = int(pool.seq_lens[0]) - 1
        table[pool.req_pool_indices[0], position] = stray
        refused(batch, f"request 0: req_to_token names KV slot {stray} for position {position}", req_to_token=table)


def test_bad_numbers_are_named(batch: Batch) -> None:
    for logit_cap in (-1.0, math.inf, math.nan):
        refused(batch, f"logit_cap is {logit_cap}", logit_cap=logit_cap)
    for scale in (math.inf, math.nan):
        refused(batch, f"scale is {scale}", scale=scale)
    refused(batch, "threads is 0", threads=0)
    for threads in (2**16 + 1, 2**31 - 1, 2**40):
        refused(batch, f"threads is {threads}; expected 1 to 65536", threads=threads)
    refused(batch, r"isa 'mmx' is not available here; expected one of .*baseline", isa="mmx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 0}, "kv_heads 0; expected a multiple"),
        ({"q_heads": 9}, "q_heads is 9 and kv_heads 2"),
        ({"q_heads": 2**17}, "q_heads is 131072 .* up to 65536"),
        ({"head_dim": 272}, "head_dim is 272; expected a multiple of 16 up to 256"),
        ({"head_dim": -16}, "head_dim is -16"),
        ({"dtype": 3}, "dtype is 3"),
        ({"kv_dtype": 4}, "kv_dtype 4"),
    ],
)
def test_native_parameters_of_no_kernel_are_refused(change: dict[str, int], message: str) -> None:
    """The kernels keep a row of 256 elements on the stack and divide by the KV heads."""
    fits = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": 0, "kv_dtype": 0}
    _native.AttentionParams(**fits)
    with pytest.raises(ValueError, match=message):
        _native.AttentionParams(**{**fits, **change})
