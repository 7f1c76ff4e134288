"""The executor computes what dense attention computes, whatever the forest, the plan and the number of threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from sgl_prefix_attn.testing.reference import reference_attention
from tests.core.forests import KvPool, Path, materialise, random_paths

GROUPS = [1, 2, 4, 5, 7, 8, 16]
HEAD_DIMS = [16, 32, 64, 80, 96, 128, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rounding of the output; the arithmetic is fp32 either way.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True, scope="module")
def reference_on_one_thread() -> Iterator[None]:
    """Small tensors: torch's threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    workspace.reserve(plan.num_slots, q.shape[1], q.shape[2])
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


# --- any forest, any shape


def check_random(rng: np.random.Generator, isa: str, **options: Any) -> None:
    """A random forest, shape and variant; `options` as for random_batch."""
    batch = random_batch(
        rng,
        max_requests=int(rng.choice([1, 6, 24])),
        max_new_tokens=int(rng.choice([1, 1, 5, 70])),
        kv_heads=int(rng.integers(1, 4)),
        group=int(rng.choice(GROUPS)),
        head_dim=int(rng.choice(HEAD_DIMS)),
        workers=int(rng.integers(1, 5)),
        **options,
    )
    if rng.random() < 0.4:
        batch.options["window_left"] = int(rng.choice([0, 1, 7, 30, 200]))
    if rng.random() < 0.4:
        batch.options["logit_cap"] = float(rng.choice([0.5, 5.0, 50.0]))
    if rng.random() < 0.4:
        batch.options["sinks"] = torch.from_numpy(rng.normal(0, 4, batch.q.shape[1]).astype(np.float32))
    check(batch, isa=isa, threads=int(rng.integers(1, 4)))


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("seed", range(40))
def test_random_ragged_forests(seed: int, isa: str) -> None:
    check_random(np.random.default_rng(seed), isa, dtype=DTYPES[seed % 3], kv_dtype=DTYPES[seed // 3 % 3])


@pytest.mark.parametrize("levels", range(1, 9))
def test_large_batches_of_every_depth(levels: int) -> None:
    rng = np.random.default_rng(levels)
    paths, seq_lens, query_lens = random_paths(rng, 128, levels, max_node_tokens=100)
    check(make_batch(rng, paths, seq_lens, query_lens, kv_heads=1, group=GROUPS[levels % len(GROUPS)]))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_and_head_dim(group: int, head_dim: int) -> None:
    rng = np.random.default_rng(group * 1000 + head_dim)
    check(random_batch(rng, group=group, head_dim=head_dim))


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("queries", [*range(1, 36), 47, 48, 49, 63, 64, 65, 127, 128, 129, 200])
def test_every_number_of_rows(queries: int, isa: str) -> None:
    """Identical requests share all but their last position, so a pack has as many rows as the planner allows."""
    rng = np.random.default_rng(queries)
    ends = np.full(queries, 65, dtype=np.int64)
    check(make_batch(rng, [[(0, 0, 64)]] * queries, ends, np.ones_like(ends), kv_heads=1, group=1), isa=isa)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 11, 12, 13, 63, 64, 65, 127, 128, 129, 500])
@pytest.mark.parametrize("requests", [1, 20])
def test_every_number_of_keys(length: int, requests: int) -> None:
    rng = np.random.default_rng(length)
    ends = np.full(requests, length + 1, dtype=np.int64)
    check(make_batch(rng, [[(0, 0, length)]] * requests, ends, np.ones_like(ends)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_dtypes_of_queries_and_cache_are_independent(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    check(random_batch(rng, 20, dtype=dtype, kv_dtype=kv_dtype, head_dim=80))


def test_all_finite_16_bit_values_survive_conversion() -> None:
    """One key: the output is its value, so every bit pattern goes through the cache and through the output."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype)
        finite = torch.where(values.isfinite(), values, torch.zeros_like(values)).reshape(-1, 1, 256)
        one = torch.ones(len(finite), dtype=torch.int64)
        paths: list[Path] = [[] for _ in finite]
        forest = PrefixForest.from_paths(paths, prefix_lens=[0] * len(finite))
        plan = Planner(ModelShape(1, 1, 256), DeviceModel.cpu(1)).plan(forest, one.numpy(), one.numpy())
        q = torch.zeros(len(finite), 1, 256, dtype=dtype)
        keys = torch.zeros_like(finite)
        for isa in _native.cpu_isas():
            out = packed_attention(
                q, keys, finite, plan, req_to_token=torch.arange(len(finite), dtype=torch.int32)[:, None],
                req_pool_indices=torch.arange(len(finite)), seq_lens=one, scale=1.0, isa=isa,
            )  # fmt: skip
            normal = finite.abs().float() >= 2.0**-126  # denormals of fp32 range may be flushed by the machine
            assert torch.equal(out[normal], finite[normal])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """fp32 values through a single key, against torch's conversion: ties, subnormals, overflow to infinity."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(127 - 28, 127 + 17, 4096).astype(np.uint32) << 23
    mantissas = rng.choice([0, 0x1000, 0x2000, 0x3000, 0x7FFFFF, 0x8000, 0x18000, 0x18001, 0x7FFF], 4096)
    values = torch.from_numpy((exponents | mantissas.astype(np.uint32)).view(np.float32)).reshape(-1, 1, 256)
    count = len(values)
    one = torch.ones(count, dtype=torch.int64)
    forest = PrefixForest.from_paths([[] for _ in range(count)], prefix_lens=[0] * count)
    plan = Planner(ModelShape(1, 1, 256), DeviceModel.cpu(1)).plan(forest, one.numpy(), one.numpy())
    for isa in _native.cpu_isas():
        out = packed_attention(
            torch.zeros(count, 1, 256, dtype=dtype), torch.zeros_like(values), values, plan, seq_lens=one, scale=1.0,
            req_to_token=torch.arange(count, dtype=torch.int32)[:, None], req_pool_indices=torch.arange(count), isa=isa,
        )  # fmt: skip
        assert torch.equal(out, values.to(dtype))


# --- masks and variants


@pytest.mark.parametrize("seed", range(12))
def test_extend_decode_and_mixed_rows_in_one_plan(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(random_batch(rng, 12, max_new_tokens=[1, 3, 40, 150][seed % 4], group=[1, 4][seed % 2]))


@pytest.mark.parametrize("window_left", [0, 1, 5, 31, 64, 1000])
@pytest.mark.parametrize("max_new_tokens", [1, 60])
def test_sliding_window_reads_nothing_that_no_query_sees(window_left: int, max_new_tokens: int) -> None:
    rng = np.random.default_rng(window_left)
    batch = random_batch(rng, 20, max_new_tokens, window_left=window_left)
    expected, expected_lse = batch.expected()
    seen = []
    for request, new in enumerate(batch.query_lens.tolist()):
        slots = batch.pool.slots_of(request)
        seen.append(slots[max(0, len(slots) - new - window_left) :])
    batch.pool.poison_all_but(torch.cat(seen))
    out, lse = batch.run()
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("logit_cap", [0.01, 1.0, 30.0])
def test_soft_cap(logit_cap: float) -> None:
    rng = np.random.default_rng(1)
    batch = random_batch(rng, 24, 4, logit_cap=logit_cap)
    batch.q *= 10
    check(batch)


@pytest.mark.parametrize("level", [-200.0, -5.0, 0.0, 5.0, 200.0])
def test_sinks_count_once(level: float) -> None:
    """A sink far above all scores takes all the weight; one far below takes none."""
    rng = np.random.default_rng(3)
    batch = random_batch(rng, 24, 3)
    batch.options["sinks"] = torch.from_numpy(rng.normal(level, 1, batch.q.shape[1]).astype(np.float32))
    check(batch)


@pytest.mark.parametrize("factor", [0.0, 30.0, 3000.0])
def test_scores_of_any_size(factor: float) -> None:
    rng = np.random.default_rng(4)
    batch = random_batch(rng, 24, 4)
    batch.q *= factor
    out, _ = batch.run()
    expected, _ = batch.expected()
    # Scores of magnitude s are known to s * 2^-24 only, and weights with them.
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=2e-5 * max(1.0, factor))


# --- isolation


@pytest.mark.parametrize("seed", range(6))
def test_a_request_does_not_see_the_slots_of_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, 12, [1, 20][seed % 2])
    expected, _ = batch.expected()
    k_cache, v_cache = batch.pool.k_cache.clone(), batch.pool.v_cache.clone()
    first = np.concatenate([[0], np.cumsum(batch.query_lens)])
    for request in range(len(batch.query_lens)):
        batch.pool.k_cache.copy_(k_cache)
        batch.pool.v_cache.copy_(v_cache)
        batch.pool.poison_all_but(batch.pool.slots_of(request))
        rows = slice(int(first[request]), int(first[request + 1]))
        out, _ = batch.run()
        torch.testing.assert_close(out[rows].double(), expected[rows], rtol=2e-5, atol=2e-5)


def test_nan_in_the_cache_reaches_the_output() -> None:
    rng = np.random.default_rng(0)
    for requests in (1, 20):  # both kernels
        ends = np.full(requests, 40, dtype=np.int64)
        batch = make_batch(rng, [[(0, 0, 39)]] * requests, ends, np.ones_like(ends))
        batch.pool.k_cache[batch.pool.slots_of(0)[17]] = torch.nan
        out, lse = batch.run()
        assert out.isnan().all()
        assert lse.isnan().all()


def test_rows_that_no_query_names_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(rng, 8)
    q = torch.cat([batch.q, torch.ones_like(batch.q[:3])])
    out = torch.full_like(q, 7.0)
    packed_attention(q, batch.pool.k_cache, batch.pool.v_cache, batch.plan, out=out, **batch.inputs())
    torch.testing.assert_close(out[:-3].double(), batch.expected()[0], rtol=2e-5, atol=2e-5)
    assert (out[-3:] == 7.0).all()


def test_strided_queries_and_outputs() -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(rng, 8)
    tokens, heads, head_dim = batch.q.shape
    fused = torch.full((tokens, 3 * heads, head_dim + 16), torch.nan)
    fused[:, :heads, :head_dim] = batch.q
    out = torch.full((heads + 1, tokens, head_dim + 4), torch.nan).transpose(0, 1)[:, :heads, :head_dim]
    packed_attention(
        fused[:, :heads, :head_dim], batch.pool.k_cache, batch.pool.v_cache, batch.plan, out=out, **batch.inputs()
    )
    torch.testing.assert_close(out.double(), batch.expected()[0], rtol=2e-5, atol=2e-5)


# --- reproducibility, reuse, processes


@pytest.mark.parametrize("seed", range(8))
def test_same_bits_for_any_number_of_threads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, 60, [1, 30][seed % 2], kv_heads=4, head_dim=64, workers=5)
    out, lse = batch.run(threads=1)
    for threads in (2, 5, 5, 2):
        again, lse_again = batch.run(threads=threads)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


def test_a_plan_serves_the_following_decode_steps() -> None:
    rng = np.random.default_rng(0)
    paths, seq_lens, query_lens = random_paths(rng, 20, 3)
    batch = make_batch(rng, paths, seq_lens + 10, query_lens)
    forest = PrefixForest.from_paths(paths, prefix_lens=(seq_lens - 1).tolist())
    batch.plan = Planner(ModelShape(4, 2, 32), DeviceModel.cpu(2)).plan(forest, seq_lens)
    for step in range(11):
        batch.pool.seq_lens = torch.from_numpy(seq_lens + step)
        check(batch)


def test_workspace_is_reused_and_only_grows() -> None:
    rng = np.random.default_rng(0)
    workspace = PartialWorkspace()
    small = make_batch(rng, [[(0, 0, 300)]] * 4, np.full(4, 310, dtype=np.int64), np.ones(4, dtype=np.int64))
    large = make_batch(rng, [[(0, 0, 300)]] * 40, np.full(40, 310, dtype=np.int64), np.ones(40, dtype=np.int64))
    assert 0 < small.plan.num_slots < large.plan.num_slots
    sizes = []
    for batch in (small, large, small):
        check(batch, workspace=workspace)
        sizes.append(workspace.nbytes)
    assert 0 < sizes[0] < sizes[1] == sizes[2]


def test_a_forked_child_computes_the_same() -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(rng, 60, kv_heads=4, head_dim=64)
    out, _ = batch.run(threads=3)
    child = os.fork()
    if child == 0:
        same = torch.equal(out, batch.run(threads=3)[0])
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- bad input


@pytest.fixture
def batch() -> Batch:
    lens = np.array([9, 14, 5, 40, 7, 8], dtype=np.int64)
    return make_batch(np.random.default_rng(0), [[(0, 0, 4)]] * 6, lens, np.ones_like(lens))


def call(batch: Batch, **changes: Any) -> None:
    arguments = {
        "q": batch.q, "k_cache": batch.pool.k_cache, "v_cache": batch.pool.v_cache, "plan": batch.plan,
        **batch.inputs(), **changes,
    }  # fmt: skip
    packed_attention(**arguments)


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
