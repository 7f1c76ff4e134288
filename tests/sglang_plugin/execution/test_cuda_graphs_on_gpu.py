"""Packed decode graphs on a real GPU: real kernels, real captures, against SGLang's torch_native backend."""

from __future__ import annotations

import pytest
import torch

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.execution import kernel_set
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.execution import test_fp8_kv as fp8
from tests.sglang_plugin.gpu_fixture import LENGTHS, SHARED, GpuFixture, assert_same, first_of, graphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["native", "triton"])
def kernels(request: pytest.FixtureRequest) -> kernel_set.Kernels:
    chosen = kernel_set.choose_kernels(request.param, torch.device("cuda"))
    if isinstance(chosen, fallback_reasons.Refused):
        pytest.skip(chosen)
    return chosen


def test_eager_decode(kernels: kernel_set.Kernels) -> None:
    fixture = GpuFixture(SHARED, LENGTHS, kernels=kernels)
    assert_same(fixture.run(), fixture.run_stock())
    assert fixture.fallbacks == {}


def test_eager_extend(kernels: kernel_set.Kernels) -> None:
    settings = Settings(metrics=False, pack_extend=True)
    fixture = GpuFixture(SHARED, LENGTHS, [40, 5, 5, 9], kernels=kernels, settings=settings)
    assert_same(fixture.run(), fixture.run_stock())
    assert fixture.fallbacks == {}


@pytest.mark.parametrize("size", [4, 5, 8])
def test_replays_of_a_growing_batch(kernels: kernel_set.Kernels, size: int) -> None:
    fixture = graphs(size, kernels=kernels)
    for _ in range(2 * STEPS_BETWEEN_PLANS):
        assert_same(fixture.graphs.replay(), fixture.run_stock())
        fixture.grow(1)
    assert fixture.fallbacks == {}
    assert all(output.isfinite().all() for output in fixture.graphs.graph(size)[1])


def test_replays_with_other_members_and_without_paths(kernels: kernel_set.Kernels) -> None:
    fixture = graphs(4, kernels=kernels)
    step = StepPaths(PrefixForest.from_paths([[(1, 0, 2000)]] * 2 + [[], []]), "decode", 4)
    other = Handed(step, fixture.batch.req_pool_indices, fixture.batch.seq_lens_cpu)
    for handed in (None, other, NOTHING, None, NOTHING, other):
        assert_same(fixture.graphs.replay(handed), fixture.run_stock())
    assert fixture.fallbacks == {fallback_reasons.NO_PATHS: 2}


def test_a_smaller_batch_in_a_larger_graph(kernels: kernel_set.Kernels) -> None:
    fixture = graphs(2, 8, kernels=kernels)
    two = first_of(fixture.batch, 2)
    step = StepPaths(PrefixForest.from_paths(SHARED[:2]), "decode", 2)
    for size in (2, 8):
        out = fixture.graphs.replay(Handed(step, two.req_pool_indices, two.seq_lens_cpu), two, size)
        assert_same(out, [rows[:2] for rows in fixture.run_stock()])


def test_fp8_kv_with_scales(kernels: kernel_set.Kernels) -> None:
    fixture = fp8.give_scales(GpuFixture(SHARED, LENGTHS, graphs=5, kernels=kernels, kv_dtype=fp8.E4M3))
    fp8.assert_same(fixture.run(), fp8.expected(fixture, fp8.SCALES))
    fixture.graphs.capture(5)
    for _ in range(3):
        fp8.assert_same(fixture.graphs.replay(), fp8.expected(fixture, fp8.SCALES))
        fixture.grow(1)
    assert fixture.fallbacks == {}


def test_the_same_replay_gives_the_same_bits(kernels: kernel_set.Kernels) -> None:
    fixture = graphs(4, kernels=kernels)
    first = fixture.graphs.replay()
    for again in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, fixture.graphs.replay(), strict=True)), again
