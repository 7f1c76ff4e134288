"""Which kernels run packed steps on a GPU: the native ones of this package, or Triton's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import cuda_step
from sgl_prefix_attn.core.cuda_step import GpuStep
from sgl_prefix_attn.core.limits import unsupported_gpu
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.core.step_buffers import StepLimits
from sgl_prefix_attn.sglang_plugin.execution.layer_support import FP8
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

MakeStep = Callable[[ModelShape, torch.dtype, torch.device, StepLimits, torch.dtype | None], Any]


@dataclass(frozen=True)
class Kernels:
    """One set of kernels.

    Attributes:
        make_step: makes the device buffers of an attention shape: a `GpuStep` or what can stand in for it.
        dtypes: of queries, and of KV if that is not fp8 e4m3.
        head_dims: None for every one that the packed path knows.
        max_tile_rows: largest row tile that plans should have.
        whole_words: whether rows have to be whole, aligned 16-byte words.
    """

    name: str
    make_step: MakeStep
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None
    max_tile_rows: int
    whole_words: bool

    def obstacle(self, head_dim: int, cache: torch.Tensor) -> str | None:
        """Why layers with this head size and K or V buffer do not run on these kernels, None if they do."""
        if self.head_dims is not None and head_dim not in self.head_dims:
            return fallback_reasons.HEAD_DIM
        if cache.dtype not in (*self.dtypes, FP8):
            return fallback_reasons.KV_DTYPE
        return None if self.takes(cache) else fallback_reasons.KV_LAYOUT

    def warpgroup_products(self, device: torch.device, kv_dtype: torch.dtype) -> bool:
        """Whether warpgroups multiply their widest tile, where the head size allows it (csrc/cuda/wide_unit.h)."""
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        return hopper and self.name == "native" and kv_dtype.itemsize == 2

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the kernels can read a [*, heads, head dim] tensor as it lies in memory."""
        if tensor.stride(2) != 1:
            return False
        words = 16 // tensor.element_size()
        return not self.whole_words or not (
            tensor.stride(0) % words or tensor.stride(1) % words or tensor.data_ptr() % 16
        )


def native_kernels() -> Kernels:
    return Kernels("native", GpuStep, tuple(cuda_step.DTYPES), cuda_step.HEAD_DIMS, max_tile_rows=128, whole_words=True)


def triton_kernels() -> Kernels:
    from sgl_prefix_attn.core import triton_step

    return Kernels(
        "triton",
        triton_step.TritonStep,
        (torch.bfloat16, torch.float16),
        head_dims=None,
        max_tile_rows=triton_step.MAX_TILE_ROWS,
        whole_words=False,
    )


def choose_kernels(setting: Literal["auto", "native", "triton"], device: torch.device) -> Kernels | str:
    """The kernels for a device under the setting `gpu_kernels`, or in words why there are none."""
    if device.type != "cuda":
        return f"there are no packed kernels for the device {device}"
    problem = _no_native(device)
    if setting != "triton" and problem is None:
        return native_kernels()
    if setting == "native":
        return f"gpu_kernels='native', but {problem}"
    try:
        return triton_kernels()
    except ImportError as error:
        return f"{problem or 'gpu_kernels is triton'}, and Triton cannot be imported: {error}"


def _no_native(device: torch.device) -> str | None:
    if not _native.built_with_cuda:
        return "sgl_prefix_attn was built without CUDA: install it where nvcc is found"
    return unsupported_gpu(device)
