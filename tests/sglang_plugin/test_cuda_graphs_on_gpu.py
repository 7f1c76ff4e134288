"""Packed decode graphs on a real GPU: real kernels, real captures, against SGLang's torch_native backend."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import runtime
from sgl_prefix_attn.sglang_plugin.execution import kernel_set
from sgl_prefix_attn.sglang_plugin.execution.executor import STEPS_WITHOUT_A_LOOK
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin import test_fp8_kv as fp8
from tests.sglang_plugin.gpu_world import GpuWorld

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHARED = [[(1, 0, 2000), (2, 2000, 2600)], [(1, 0, 2000), (2, 2000, 2600)], [(1, 0, 2000)], []]
LENGTHS = [2640, 2605, 2005, 9]


@pytest.fixture(autouse=True)
def _one_runtime_per_test() -> Iterator[None]:
    yield
    runtime.stop()


@pytest.fixture(params=["native", "triton"])
def kernels(request: pytest.FixtureRequest) -> kernel_set.Kernels:
    chosen = kernel_set.choose_kernels(request.param, torch.device("cuda"))
    if isinstance(chosen, str):
        pytest.skip(chosen)
    return chosen


def graphs(kernels: kernel_set.Kernels, *sizes: int, **options: Any) -> GpuWorld:
    world = GpuWorld(SHARED, LENGTHS, graphs=max(sizes), kernels=kernels, **options)
    for size in sorted(sizes, reverse=True):
        world.graphs.capture(size)
    return world


def assert_same(packed: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    for ours, theirs in zip(packed, stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_eager_decode(kernels: kernel_set.Kernels) -> None:
    world = GpuWorld(SHARED, LENGTHS, kernels=kernels)
    assert_same(world.run(), world.run_stock())
    assert world.fallbacks == {}


def test_eager_extend(kernels: kernel_set.Kernels) -> None:
    settings = Settings(metrics=False, pack_extend=True)
    world = GpuWorld(SHARED, LENGTHS, [40, 5, 5, 9], kernels=kernels, settings=settings)
    assert_same(world.run(), world.run_stock())
    assert world.fallbacks == {}


@pytest.mark.parametrize("size", [4, 5, 8])
def test_replays_of_a_growing_batch(kernels: kernel_set.Kernels, size: int) -> None:
    world = graphs(kernels, size)
    for _ in range(2 * STEPS_WITHOUT_A_LOOK):
        assert_same(world.graphs.replay(), world.run_stock())
        world.grow(1)
    assert world.fallbacks == {}
    assert all(output.isfinite().all() for output in world.graphs.graph(size)[1])


def test_replays_with_other_members_and_without_paths(kernels: kernel_set.Kernels) -> None:
    world = graphs(kernels, 4)
    step = StepPaths(PrefixForest.from_paths([[(1, 0, 2000)]] * 2 + [[], []]), "decode", 4, 4)
    other = Handed(step, world.batch.req_pool_indices, world.batch.seq_lens_cpu)
    for handed in (None, other, NOTHING, None, NOTHING, other):
        assert_same(world.graphs.replay(handed), world.run_stock())
    assert world.fallbacks == {fallback_reasons.NO_PATHS: 2}


def test_a_smaller_batch_in_a_larger_graph(kernels: kernel_set.Kernels) -> None:
    world = graphs(kernels, 2, 8)
    two = SimpleNamespace(**vars(world.batch))
    two.batch_size = 2
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
        setattr(two, name, getattr(world.batch, name)[:2])
    step = StepPaths(PrefixForest.from_paths(SHARED[:2]), "decode", 2, 2)
    for size in (2, 8):
        out = world.graphs.replay(Handed(step, two.req_pool_indices, two.seq_lens_cpu), two, size)
        assert_same(out, [rows[:2] for rows in world.run_stock()])


def test_fp8_kv_with_scales(kernels: kernel_set.Kernels) -> None:
    world = fp8.give_scales(GpuWorld(SHARED, LENGTHS, graphs=5, kernels=kernels, kv_dtype=fp8.E4M3))
    fp8.assert_same(world.run(), fp8.expected(world, fp8.SCALES))
    world.graphs.capture(5)
    for _ in range(3):
        fp8.assert_same(world.graphs.replay(), fp8.expected(world, fp8.SCALES))
        world.grow(1)
    assert world.fallbacks == {}


def test_the_same_replay_gives_the_same_bits(kernels: kernel_set.Kernels) -> None:
    world = graphs(kernels, 4)
    first = world.graphs.replay()
    for again in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, world.graphs.replay(), strict=True)), again
