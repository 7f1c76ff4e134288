"""The GPU kernels on a GPU: every shape against dense attention, graphs, and the same bits twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.cuda_step import CudaStep
from sgl_prefix_attn.core.step_buffers import StepLimits
from tests.cuda.cases import Case, check, decode_batch, make_case, same
from tests.cuda.on_device import OnDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _native.built_with_cuda),
        reason="needs a CUDA device, and the native module built with nvcc",
    ),
]

GROWTH = 16
LIMITS = StepLimits(queries=8192, items=16384, kv_slots=1 << 20, partials=32768)


def on_gpu(case: Case, limits: StepLimits = LIMITS) -> OnDevice:
    return OnDevice(case, CudaStep, torch.device("cuda", 0), limits, GROWTH)


def shapes() -> Iterator[dict[str, Any]]:
    """Groups, head sizes, types and scales of KV; trees of drafts; lengths around the KV tile."""
    large: dict[str, Any] = {"requests": 40, "levels": 5, "tokens": 300}
    fp8 = {"kv_dtype": torch.float8_e4m3fn}
    for head_dim, dtype in itertools.product((64, 128, 256), (torch.bfloat16, torch.float16)):
        sizes = {"head_dim": head_dim, "dtype": dtype, **large}
        for group in (1, 2, 4, 5, 7, 8, 16):
            yield {"seed": group, "heads": (2 * group, 2), "num_sms": 132, **sizes}
        for group, new in ((1, 1), (4, 1), (7, 1), (16, 40)):
            yield {"seed": group, "heads": (2 * group, 2), "max_new_tokens": new, "v_scale": 0.37, **fp8, **sizes}
    for seed, kv in itertools.product(range(6), ({}, fp8)):
        ragged = {"requests": 60, "levels": 4, "tokens": 300, "max_new_tokens": 64, "trees": True, **kv}
        yield {"seed": seed, "heads": (32, 8), "head_dim": 128, "num_sms": 132, **ragged}
    for length in (1, 63, 64, 65, 1000, 33000):
        yield {"seed": length, "heads": (8, 1), "head_dim": 128, "batch": decode_batch([length, 1]), "num_sms": 132}


@pytest.mark.parametrize("options", shapes(), ids=str)
def test_shapes(options: dict[str, Any]) -> None:
    case = make_case(**options)
    check(case, on_gpu(case).run())


@pytest.mark.parametrize("seed", range(24))
def test_random_ragged_forests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = make_case(
        seed,
        heads=(32, 8),
        head_dim=128,
        requests=int(rng.integers(1, 513)),
        levels=int(rng.integers(1, 9)),
        tokens=int(rng.choice([20, 200, 600])),
        max_new_tokens=int(rng.choice([1, 5, 200])),
        num_sms=132,
    )
    check(case, on_gpu(case, StepLimits(1 << 17, 1 << 17, 1 << 24, 1 << 16)).run())


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("drafts", [2, 3, 4, 8, 16, 31, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_verify_steps(drafts: int, trees: bool, head_dim: int) -> None:
    """48 samples of three prompts, in a captured graph, for which a plan with shorter tails was loaded."""
    rng = np.random.default_rng(drafts)
    paths = [[(prompt, 0, 700)] for prompt in range(3) for _ in range(16)]
    lens = 700 + drafts + rng.integers(0, 300, len(paths))
    batch = (paths, lens, np.full(len(paths), drafts, dtype=np.int64))
    case = make_case(drafts, heads=(32, 8), head_dim=head_dim, batch=batch, num_sms=132, grown=GROWTH, trees=trees)
    runner = on_gpu(case)
    check(case, runner.run())
    graph = runner.captured()
    runner.prepare_at(runner.seq_lens - GROWTH)
    graph.replay()
    runner.prepare_at(runner.seq_lens)
    graph.replay()
    torch.cuda.synchronize()
    check(case, (runner.out, runner.lse))


def test_the_same_bits_twice() -> None:
    case = make_case(4, heads=(32, 8), head_dim=128, requests=200, levels=6, tokens=400, num_sms=132)
    runner = on_gpu(case)
    assert same(runner.run(), runner.run())
