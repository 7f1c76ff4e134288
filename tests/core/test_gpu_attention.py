"""What `packed_attention` decides before it goes to a GPU: kernels, sizes of buffers."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import limits, step_pool
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from sgl_prefix_attn.core.step_pool import limits_of, why_not_native_call
from tests.core.forests import random_paths


def make_plan(device: DeviceModel, head_dim: int = 128, requests: int = 20) -> tuple[Plan, np.ndarray]:
    paths, lens, _ = random_paths(np.random.default_rng(1), requests, 3)
    return Planner(ModelShape(8, 2, head_dim), device).plan(PrefixForest.from_paths(paths), lens), lens


class OnGpu:
    """What `why_not_native_call` looks at of a tensor."""

    device = torch.device("cuda", 0)

    def __init__(self, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, gap: int = 0) -> None:
        self.shape = (20, 8, head_dim)
        self.dtype = dtype
        self._strides = (8 * (head_dim + gap), head_dim + gap, 1)

    def stride(self, dim: int | None = None) -> int | tuple[int, ...]:
        return self._strides if dim is None else self._strides[dim]

    def data_ptr(self) -> int:
        return 4096


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """An NVIDIA GPU of this capability, and a native module built for it."""
    capability = [(9, 0)]
    monkeypatch.setattr(_native, "built_with_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(limits, "code_capability", lambda device: 10 * capability[0][0] + capability[0][1])
    monkeypatch.setattr(limits, "shared_bytes_per_cta", lambda device: 227 << 10)
    return capability


def test_what_native_kernels_do_not_run_is_said(capability, monkeypatch):
    plan, _ = make_plan(DeviceModel.gpu(132))
    for_cpu, _ = make_plan(DeviceModel.cpu(2))
    q = OnGpu()

    def unsupported_reason(plan: Plan = plan, q: OnGpu = q, cache: OnGpu = q) -> str | None:
        return why_not_native_call(plan, q, cache, cache, q)  # type: ignore[arg-type]

    assert unsupported_reason() is None
    assert "not 80" in str(unsupported_reason(q=OnGpu(80)))
    assert "not torch.float32" in str(unsupported_reason(q=OnGpu(dtype=torch.float32)))
    assert "over torch.float16" in str(unsupported_reason(cache=OnGpu(dtype=torch.float16)))
    assert "k_cache has strides" in str(unsupported_reason(cache=OnGpu(gap=4)))
    assert "made for another device" in str(unsupported_reason(plan=for_cpu))
    most = int(np.diff(plan.combine_offset).max())
    with monkeypatch.context() as smaller:
        smaller.setattr(_native, "combine_room", most - 1)
        assert f"{most} partial results of one query" in str(unsupported_reason())
    capability[0] = (8, 0)
    assert "code for compute capability 8.0 has never run" in str(unsupported_reason())
    capability[0] = (7, 5)
    assert "the GPU has 7.5" in str(unsupported_reason())
    monkeypatch.setattr(_native, "built_with_cuda", False)
    assert "built without CUDA" in str(unsupported_reason())


def test_without_triton_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_prefix_attn.core.triton_step", None)
    with pytest.raises(RuntimeError, match="no kernel for this call: because; and triton cannot be imported"):
        step_pool._triton_step("because")


def test_limits_hold_what_the_plan_reads() -> None:
    plan, lens = make_plan(DeviceModel.gpu(132), requests=60)
    limits = limits_of(plan, lens, ModelShape(8, 2, 128))
    assert (limits.queries, limits.items, limits.partials) == (60, len(plan.items), plan.num_partials)
    assert limits.kv_slots >= plan.kv_tokens_packed > 0
