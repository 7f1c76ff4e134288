"""The GPU kernels on a GPU: every shape against dense attention, graphs, and the same bits twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.cuda_step import GpuStep
from sgl_prefix_attn.core.step_buffers import StepLimits
from tests.cuda.cases import Case, Result, check, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _native.built_with_cuda),
        reason="needs a CUDA device, and the native module built with nvcc",
    ),
]

GROWTH = 16
LIMITS = StepLimits(queries=8192, items=16384, kv_slots=1 << 20, partial_slots=32768)


class OnGpu:
    """A case with its tensors on the device."""

    def __init__(self, case: Case, limits: StepLimits = LIMITS) -> None:
        self.case = case
        self.device = torch.device("cuda", 0)
        pool = case.pool
        self.step = GpuStep(case.shape, case.q.dtype, self.device, limits, pool.k_cache.dtype)
        self.q = case.q.to(self.device)
        # Clones keep the gaps between heads and slots that the pool was made with.
        self.k_cache, self.v_cache = self._with_gaps(pool.k_cache), self._with_gaps(pool.v_cache)
        self.req_to_token = pool.req_to_token.to(self.device)
        self.rows = pool.req_pool_indices.to(self.device)
        self.seq_lens = pool.seq_lens.to(self.device)
        self.visible = None if case.visible is None else case.visible.to(self.device)
        self.out = torch.full_like(self.q, torch.nan)
        self.lse = torch.full(self.q.shape[:2], torch.nan, device=self.device)
        self.variant = {
            key: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for key, value in case.variant.items()
        }

    def _with_gaps(self, cache: torch.Tensor) -> torch.Tensor:
        slots, heads, head_dim = cache.shape
        storage = torch.full((slots, heads + 1, head_dim + 16), torch.nan, dtype=cache.dtype).to(self.device)
        storage[:, :heads, :head_dim] = cache.to(self.device)
        return storage[:, :heads, :head_dim]

    def prepare(self) -> None:
        self.step.load(self.case.plan, self.case.planned_lens, GROWTH)
        self.prepare_at(self.seq_lens)

    def prepare_at(self, seq_lens: torch.Tensor) -> None:
        self.step.prepare(self.req_to_token, self.rows, seq_lens, self.visible)

    def attend(self) -> None:
        self.step.attend(self.q, self.k_cache, self.v_cache, self.out, lse=self.lse, **self.variant)

    def run(self) -> Result:
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.step._partial_o.fill_(torch.nan)
        self.step._partial_lse.fill_(torch.nan)
        self.prepare()
        self.attend()
        torch.cuda.synchronize()
        return self.out.clone(), self.lse.clone()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_groups_head_sizes_and_types(group: int, dtype: torch.dtype, head_dim: int) -> None:
    case = make_case(
        group,
        heads=(2 * group, 2),
        head_dim=head_dim,
        dtype=dtype,
        requests=40,
        levels=5,
        tokens=300,
        num_sms=132,
    )
    check(case, OnGpu(case).run())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_fp8_kv(group: int, dtype: torch.dtype, head_dim: int) -> None:
    case = make_case(
        group, heads=(2 * group, 2), head_dim=head_dim, dtype=dtype, kv_dtype=torch.float8_e4m3fn, v_scale=0.37,
        requests=40, levels=5, tokens=300, max_new_tokens=1 if group < 16 else 40,
    )  # fmt: skip
    check(case, OnGpu(case).run())


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
    check(case, OnGpu(case, StepLimits(1 << 17, 1 << 17, 1 << 24, 1 << 16)).run())


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
    on_gpu = OnGpu(case)
    check(case, on_gpu.run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.attend()
    on_gpu.prepare_at(on_gpu.seq_lens - GROWTH)
    graph.replay()
    on_gpu.prepare_at(on_gpu.seq_lens)
    graph.replay()
    torch.cuda.synchronize()
    check(case, (on_gpu.out, on_gpu.lse))


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("seed", range(6))
def test_ragged_trees(seed: int, kv_dtype: torch.dtype | None) -> None:
    case = make_case(
        seed, heads=(32, 8), head_dim=128, kv_dtype=kv_dtype, requests=60, levels=4, tokens=300, max_new_tokens=64,
        num_sms=132, trees=True,
    )  # fmt: skip
    check(case, OnGpu(case).run())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 33000])
def test_lengths(length: int) -> None:
    batch = ([[], []], np.array([length, 1], dtype=np.int64), np.ones(2, dtype=np.int64))
    case = make_case(length, heads=(8, 1), head_dim=128, batch=batch, num_sms=132)
    check(case, OnGpu(case).run())


def test_the_same_bits_twice() -> None:
    case = make_case(4, heads=(32, 8), head_dim=128, requests=200, levels=6, tokens=400, num_sms=132)
    on_gpu = OnGpu(case)
    first, second = on_gpu.run(), on_gpu.run()
    assert torch.equal(first[0].view(torch.int16), second[0].view(torch.int16))
    assert torch.equal(first[1], second[1])


def test_a_captured_graph_serves_longer_tails_and_other_plans() -> None:
    case = make_case(5, head_dim=128, requests=30, num_sms=132, grown=GROWTH)
    on_gpu = OnGpu(case)
    eager = on_gpu.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.attend()
    on_gpu.out.fill_(torch.nan)
    # As if the step before had been a shorter one.
    on_gpu.prepare_at(on_gpu.seq_lens - GROWTH)
    graph.replay()
    on_gpu.prepare_at(on_gpu.seq_lens)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(on_gpu.out.view(torch.int16), eager[0].view(torch.int16))
    check(case, (on_gpu.out, on_gpu.lse))
