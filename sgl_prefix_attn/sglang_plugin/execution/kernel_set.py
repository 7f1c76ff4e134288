"""The kernels that run packed steps on a GPU: the native CUDA kernels of this package, or its Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sgl_prefix_attn.core import cuda_step
from sgl_prefix_attn.core.cuda_step import CudaStep
from sgl_prefix_attn.core.gpu import gpu_of, planner_model
from sgl_prefix_attn.core.limits import code_capability, why_not_native
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.core.step_buffers import StepLimits
from sgl_prefix_attn.sglang_plugin.execution.layer_support import FP8
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason, Refused

MakeStep = Callable[[ModelShape, torch.dtype, torch.device, StepLimits, torch.dtype | None], Any]


@dataclass(frozen=True)
class Kernels:
    """One set of kernels.

    Attributes:
        name: name in the setting `gpu_kernels`.
        make_step: makes the device buffers of an attention shape: a `CudaStep` or an object with its interface.
        dtypes: types of queries, and of KV besides fp8 e4m3.
        head_dims: supported head sizes; None: all that `layer_support` accepts.
        max_tile_rows: largest row tile of a plan.
        whole_words: whether rows must be aligned to, and a multiple of, 16 bytes.
        reads_trees: whether the kernels read masks of visible drafts.
    """

    name: str
    make_step: MakeStep
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None
    max_tile_rows: int
    whole_words: bool
    reads_trees: bool = False

    def unsupported_reason(self, head_dim: int, cache: torch.Tensor) -> Reason | None:
        """The reason why these kernels cannot run layers with this head size and K or V buffer, None if they can."""
        if self.head_dims is not None and head_dim not in self.head_dims:
            return fallback_reasons.HEAD_DIM
        if cache.dtype not in (*self.dtypes, FP8):
            return fallback_reasons.KV_DTYPE
        return None if self.takes(cache) else fallback_reasons.KV_LAYOUT

    def device_model(self, device: torch.device, shape: ModelShape, most_rows: int) -> DeviceModel:
        """The planner's model of a device with these kernels. most_rows: of a tile, by the settings."""
        native = self.name == "native" and device.type == "cuda"
        code = code_capability(device) if native else None
        return planner_model(gpu_of(device), shape, code, max_tile_rows=min(most_rows, self.max_tile_rows))

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the kernels can read a [*, heads, head dim] tensor with its strides and alignment."""
        if tensor.stride(2) != 1:
            return False
        words = 16 // tensor.element_size()
        return not self.whole_words or not (
            tensor.stride(0) % words or tensor.stride(1) % words or tensor.data_ptr() % 16
        )


def native_kernels() -> Kernels:
    return Kernels(
        "native",
        CudaStep,
        tuple(cuda_step.DTYPES),
        cuda_step.HEAD_DIMS,
        max_tile_rows=128,
        whole_words=True,
        reads_trees=True,
    )


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


def choose_kernels(setting: Literal["auto", "native", "triton"], device: torch.device) -> Kernels | Refused:
    """The kernels for a device under the setting `gpu_kernels`, or why there are none."""
    if device.type != "cuda":
        return _no_kernels(f"there are no packed kernels for the device {device}")
    if torch.version.hip is not None and setting != "triton":  # PyTorch calls AMD's GPUs cuda, too
        return _no_kernels(
            "AMD GPUs are not supported; gpu_kernels=triton tries the Triton kernels, which never ran on one"
        )
    no_native = None
    if setting != "triton":
        no_native = why_not_native(device, asked=setting == "native")
        if no_native is None:
            return native_kernels()
    if setting == "native":
        return _no_kernels(f"gpu_kernels='native', but {no_native}")
    try:
        return triton_kernels()
    except ImportError as error:
        return _no_kernels(f"{no_native or 'gpu_kernels is triton'}, and Triton cannot be imported: {error}")


def _no_kernels(detail: str) -> Refused:
    return Refused(fallback_reasons.NO_CUDA_KERNEL, detail)
