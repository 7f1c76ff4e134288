"""The executor over an fp8 e4m3 cache: every number of the type is read as it is, and scales count once."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.attention import packed_attention
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from tests.core.batches import DTYPES, Batch, check_random, make_batch, random_batch, refused

E4M3 = torch.float8_e4m3fn
ALL_NUMBERS = torch.arange(256, dtype=torch.uint8).view(E4M3)


def fp8_batch(seed: int, *args: Any, **options: Any) -> Batch:
    return random_batch(np.random.default_rng(seed), *args, kv_dtype=E4M3, **options)


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("seed", range(24))
def test_random_ragged_forests(seed: int, isa: str) -> None:
    rng = np.random.default_rng(seed)
    k_scale, v_scale = rng.uniform(0.05, 3, 2).tolist()
    check_random(rng, isa, dtype=DTYPES[seed % 3], kv_dtype=E4M3, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("group", [1, 256], ids=["few rows", "many rows"])
def test_all_256_numbers_are_read_exactly(group: int, isa: str) -> None:
    """One KV position: its value is the output, and a query that is zero but for one dimension has the key as score."""
    tokens = 256 // group
    one = torch.ones(tokens, dtype=torch.int64)
    plan = Planner(ModelShape(group, 1, 256), DeviceModel.cpu(1)).plan(
        PrefixForest.from_paths([[]] * tokens, prefix_lens=[0] * tokens), one.numpy(), one.numpy()
    )
    cache = ALL_NUMBERS.reshape(1, 1, 256)
    zeros = torch.zeros(256, dtype=torch.uint8).view(E4M3).reshape(1, 1, 256)
    lse = torch.full((tokens, group), torch.nan)
    where: dict[str, Any] = {
        "req_to_token": torch.zeros(tokens, 1, dtype=torch.int32), "req_pool_indices": torch.arange(tokens),
        "seq_lens": one, "scale": 1.0, "lse": lse, "isa": isa,
    }  # fmt: skip

    q = torch.zeros(tokens, group, 256)
    out = packed_attention(q, zeros, cache, plan, **where)
    torch.testing.assert_close(out, ALL_NUMBERS.float().expand_as(out), rtol=0, atol=0, equal_nan=True)
    assert out[0, 0].isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]

    # NaN times zero is NaN, so without them; which they reach the scores with is for the test below.
    finite = torch.where(ALL_NUMBERS.float().isnan(), zeros.flatten().float(), ALL_NUMBERS.float())
    q = torch.eye(256).reshape(tokens, group, 256)
    packed_attention(q, finite.to(E4M3).reshape(1, 1, 256), zeros, plan, **where)
    torch.testing.assert_close(lse.flatten(), finite, rtol=2e-7, atol=0)  # by way of log2


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_scale_of_values_counts_once_however_many_partials_a_query_has(with_sinks: bool) -> None:
    """Times a power of two, so that the bits tell: of the output all, of lse none."""
    paths = [[(0, 0, 2000), (1 + i // 20, 2000, 2600)] for i in range(60)] + [[], []]
    lens = np.array([2620] * 60 + [40, 7], dtype=np.int64)
    batch = make_batch(np.random.default_rng(0), paths, lens, np.ones_like(lens), kv_dtype=E4M3, workers=5)
    partials = np.diff(batch.plan.combine_offset)
    assert partials.max() >= 3
    assert len(partials) < batch.plan.num_queries, "some queries have no partials"
    if with_sinks:
        batch.options["sinks"] = torch.linspace(-2.0, 2.0, batch.q.shape[1])
    out, lse = batch.run()
    scaled, lse_scaled = batch.run(v_scale=0.25)
    assert torch.equal(scaled, out * 0.25)
    assert torch.equal(lse_scaled, lse)


@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
def test_the_scale_of_keys_is_part_of_the_scores(logit_cap: float) -> None:
    batch = fp8_batch(1, logit_cap=logit_cap)
    scale = 1 / math.sqrt(batch.q.shape[-1])
    out, lse = batch.run(k_scale=2.0)
    again, lse_again = batch.run(scale=2.0 * scale)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.fixture
def batch() -> Batch:
    lens = np.array([9, 14, 5, 40, 7, 8], dtype=np.int64)
    return make_batch(np.random.default_rng(0), [[(0, 0, 4)]] * 6, lens, np.ones_like(lens), kv_dtype=E4M3)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_scales_must_be_positive_and_finite(batch: Batch, name: str, value: float) -> None:
    refused(batch, f"{name} is {value}; expected a positive, finite number", **{name: value})


def test_other_8_bit_types_are_refused(batch: Batch) -> None:
    wrong = partial(refused, batch, error=TypeError)
    for other in (torch.float8_e5m2, torch.float8_e4m3fnuz):
        cache = batch.pool.k_cache.view(torch.uint8).view(other)
        wrong(rf"k_cache has dtype {other}; expected one of .*torch.float8_e4m3fn", k_cache=cache, v_cache=cache)
    wrong(
        r"v_cache has dtype torch.bfloat16 but k_cache has torch.float8_e4m3fn", v_cache=batch.pool.v_cache.bfloat16()
    )
    wrong(r"q has dtype torch.float8_e4m3fn; expected one of (?!.*float8)", q=batch.q.to(E4M3))
