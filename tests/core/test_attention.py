"""The executor computes what dense attention computes, whatever the forest, the plan and the number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from tests.core.batches import DTYPES, check, check_random, make_batch, random_batch
from tests.core.forests import random_paths


@pytest.fixture(autouse=True, scope="module")
def reference_on_one_thread() -> Iterator[None]:
    """Small tensors: torch's threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("seed", range(40))
def test_random_ragged_forests(seed: int, isa: str) -> None:
    check_random(np.random.default_rng(seed), isa, dtype=DTYPES[seed % 3], kv_dtype=DTYPES[seed // 3 % 3])


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


def through_one_key(values: torch.Tensor, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Attention of as many requests as there are rows [rows, 1, 256], with one key each: the outputs are the values."""
    count, one = len(values), torch.ones(len(values), dtype=torch.int64)
    forest = PrefixForest.from_paths([[] for _ in range(count)], prefix_lens=[0] * count)
    plan = Planner(ModelShape(1, 1, 256), DeviceModel.cpu(1)).plan(forest, one.numpy(), one.numpy())
    return packed_attention(
        torch.zeros(count, 1, 256, dtype=dtype), torch.zeros_like(values), values, plan, seq_lens=one, scale=1.0,
        req_to_token=torch.arange(count, dtype=torch.int32)[:, None], req_pool_indices=torch.arange(count), isa=isa,
    )  # fmt: skip


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_finite_16_bit_values_survive_conversion(dtype: torch.dtype, isa: str) -> None:
    """Every bit pattern goes through the cache and through the output."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = torch.where(values.isfinite(), values, torch.zeros_like(values)).reshape(-1, 1, 256)
    normal = finite.abs().float() >= 2.0**-126  # denormals of fp32 range may be flushed by the machine
    assert torch.equal(through_one_key(finite, dtype, isa)[normal], finite[normal])


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_to_nearest_even(dtype: torch.dtype, isa: str) -> None:
    """fp32 values, against torch's conversion: ties, subnormals, overflow to infinity."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(127 - 28, 127 + 17, 4096).astype(np.uint32) << 23
    mantissas = rng.choice([0, 0x1000, 0x2000, 0x3000, 0x7FFFFF, 0x8000, 0x18000, 0x18001, 0x7FFF], 4096)
    values = torch.from_numpy((exponents | mantissas.astype(np.uint32)).view(np.float32)).reshape(-1, 1, 256)
    assert torch.equal(through_one_key(values, dtype, isa), values.to(dtype))


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
    assert 0 < small.plan.num_partials < large.plan.num_partials
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
