"""What `packed_attention` refuses, and that the message names the argument and the value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.core.batches import Batch, call, make_batch


@pytest.fixture
def batch() -> Batch:
    lens = np.array([9, 14, 5, 40, 7, 8], dtype=np.int64)
    return make_batch(np.random.default_rng(0), [[(0, 0, 4)]] * 6, lens, np.ones_like(lens))


def test_disagreeing_shapes_are_named(batch: Batch) -> None:
    tokens, heads, head_dim = batch.q.shape
    with pytest.raises(ValueError, match="q has head_dim 48 but k_cache has 32"):
        call(batch, q=torch.zeros(tokens, heads, 48))
    with pytest.raises(ValueError, match="q has 3 heads, which is no multiple of the 2 heads of k_cache"):
        call(batch, q=torch.zeros(tokens, 3, head_dim))
    with pytest.raises(ValueError, match=r"q has shape .* expected \[tokens, q_heads, head_dim\]"):
        call(batch, q=batch.q.flatten(1))
    with pytest.raises(ValueError, match="v_cache has shape"):
        call(batch, v_cache=batch.pool.v_cache[:-1])
    with pytest.raises(ValueError, match="out has shape"):
        call(batch, out=torch.zeros(tokens + 1, heads, head_dim))
    with pytest.raises(ValueError, match="lse has shape"):
        call(batch, lse=torch.zeros(heads, tokens))
    with pytest.raises(ValueError, match="sinks has shape"):
        call(batch, sinks=torch.zeros(heads + 1))
    with pytest.raises(ValueError, match="visible has 5 entries; expected 6"):
        call(batch, visible=torch.zeros(tokens - 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="the plan is for"):
        call(batch, seq_lens=torch.ones(99, dtype=torch.int64), req_pool_indices=torch.zeros(99, dtype=torch.int64))
    with pytest.raises(ValueError, match="req_pool_indices has 1 entries"):
        call(batch, req_pool_indices=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_head_dim_must_be_a_multiple_of_16_up_to_256(batch: Batch, head_dim: int) -> None:
    cache = torch.zeros(4, 2, head_dim)
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}"):
        call(batch, q=torch.zeros(6, 4, head_dim), k_cache=cache, v_cache=cache)


def test_wrong_dtypes_are_named(batch: Batch) -> None:
    with pytest.raises(TypeError, match=r"q has dtype torch.float64"):
        call(batch, q=batch.q.double())
    cache = batch.pool.k_cache.to(torch.uint8)
    with pytest.raises(TypeError, match=r"k_cache has dtype torch.uint8"):
        call(batch, k_cache=cache, v_cache=cache)
    with pytest.raises(TypeError, match=r"v_cache has dtype torch.bfloat16 but k_cache has torch.float32"):
        call(batch, v_cache=batch.pool.v_cache.bfloat16())
    with pytest.raises(TypeError, match=r"out has dtype torch.float16 but q has torch.float32"):
        call(batch, out=batch.q.half())
    with pytest.raises(TypeError, match=r"req_to_token has dtype torch.int64; expected torch.int32"):
        call(batch, req_to_token=batch.pool.req_to_token.long())
    with pytest.raises(TypeError, match=r"seq_lens has dtype torch.int32; expected torch.int64"):
        call(batch, seq_lens=batch.pool.seq_lens.int())
    with pytest.raises(TypeError, match=r"lse has dtype torch.float16"):
        call(batch, lse=batch.q[:, :, 0].half())


def test_innermost_strides_must_be_one(batch: Batch) -> None:
    with pytest.raises(ValueError, match="k_cache has strides"):
        call(batch, k_cache=batch.pool.k_cache.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="req_to_token has strides"):
        call(batch, req_to_token=batch.pool.req_to_token.T.contiguous().T)


def test_tensors_elsewhere_are_refused(batch: Batch) -> None:
    with pytest.raises(ValueError, match="q is on meta; packed_attention runs on CPU and CUDA tensors"):
        call(batch, q=batch.q.to("meta"))
    with pytest.raises(ValueError, match="k_cache is on meta but q is on cpu"):
        call(batch, k_cache=batch.pool.k_cache.to("meta"))
    with pytest.raises(ValueError, match="seq_lens is on meta but q is on cpu"):
        call(batch, seq_lens=batch.pool.seq_lens.to("meta"))
    with pytest.raises(ValueError, match="lse is on meta but q is on cpu"):
        call(batch, lse=torch.zeros(batch.q.shape[:2], device="meta"))


def test_indices_that_lead_outside_are_named(batch: Batch) -> None:
    pool, rows = batch.pool, len(batch.pool.req_to_token)
    indices = pool.req_pool_indices.clone()
    indices[1] = rows
    with pytest.raises(ValueError, match=f"request 1: req_pool_indices is {rows}, .* below {rows}"):
        call(batch, req_pool_indices=indices)
    with pytest.raises(ValueError, match="request 0: seq_lens is"):
        call(batch, seq_lens=pool.seq_lens + 1000)
    with pytest.raises(ValueError, match="request 0: seq_lens is -"):
        call(batch, seq_lens=pool.seq_lens - 10000)
    with pytest.raises(ValueError, match="position is -1"):
        call(batch, seq_lens=torch.zeros_like(pool.seq_lens))
    with pytest.raises(ValueError, match=r"query \d+: row of q is"):
        call(batch, q=batch.q[:-1])
    for stray in (len(pool.k_cache), -1):
        table = pool.req_to_token.clone()
        position = int(pool.seq_lens[0]) - 1
        table[pool.req_pool_indices[0], position] = stray
        with pytest.raises(ValueError, match=f"request 0: req_to_token names KV slot {stray} for position {position}"):
            call(batch, req_to_token=table)


def test_bad_numbers_are_named(batch: Batch) -> None:
    with pytest.raises(ValueError, match="logit_cap is -1"):
        call(batch, logit_cap=-1.0)
    with pytest.raises(ValueError, match="threads is 0"):
        call(batch, threads=0)
    with pytest.raises(ValueError, match=r"isa 'mmx' is not available here; expected one of .*baseline"):
        call(batch, isa="mmx")
