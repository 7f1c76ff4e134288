"""Runs plans with Triton's kernels: replaces `core.cuda_step.CudaStep` on builds without nvcc and on other GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from sgl_prefix_attn.core import triton_kernels
from sgl_prefix_attn.core.limits import MAX_HEAD_DIM, TRITON_TILE_ROWS
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.core.step_buffers import StepBuffers, StepLimits

MAX_TILE_ROWS = TRITON_TILE_ROWS  # for the best plans; plans with wider tiles run as well
_TRITON_TYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
DTYPES = tuple(_TRITON_TYPE)
E4M3_UNIT = 256.0  # the kernels' value of 1.0 in e4m3
KV_DTYPES = (*DTYPES, torch.float8_e4m3fn)
# The interpreter multiplies no bf16: it takes all products in fp32.
INTERPRETED = isinstance(triton_kernels.attend_packed, InterpretedFunction)
_INTERPRETED_PROGRAMS = 3  # more than one, so that they share the queue
PREPARE_BLOCK = 2048
_COMBINED_VALUES = 2048  # of a combine program at a time
_KEY_TILE_BYTES = 16 << 10
# K and V tiles in flight need this much shared memory per program.
_THREE_STAGES_FROM_BYTES = 160 << 10


def product_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """The narrowest type that represents every number of both types."""
    return dtype if kv_dtype in (dtype, torch.float8_e4m3fn) else torch.float32


def attend_constants(
    shape: ModelShape,
    product: torch.dtype,
    has_cap: bool,
    has_window: bool,
    *,
    fp8: bool = False,
    amd: bool = torch.version.hip is not None,
) -> dict[str, Any]:
    """What `attend_packed` is compiled for; `product` is the type in which products are taken, `fp8` that of KV."""
    padded_dim = _padded(shape.head_dim)
    # Taking bytes apart needs registers, which wide heads leave for fewer keys at a time.
    most_keys = 32 if fp8 and padded_dim > 64 else 64
    return {
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": padded_dim,
        # The widest queries in fp32 leave small GPUs no shared memory for keys.
        "WIDE_ROWS": MAX_TILE_ROWS if padded_dim * product.itemsize <= 512 else MAX_TILE_ROWS // 2,
        "KEYS": min(most_keys, max(16, _KEY_TILE_BYTES // (padded_dim * product.itemsize))),
        "HAS_CAP": has_cap,
        "HAS_WINDOW": has_window,
        "PRODUCT": _TRITON_TYPE[product],
        # Three products of TF32 parts are as exact as one of fp32; AMD's matrix units multiply fp32 themselves.
        "PRECISION": "ieee" if amd else "tf32x3",
        # The sums of a wide head do not fit the registers of four warps of 32 lanes.
        "num_warps": 8 if padded_dim > 128 and not amd else 4,
    }


def combine_constants(shape: ModelShape) -> dict[str, Any]:
    """What `combine_partials` is compiled for."""
    padded_dim = _padded(shape.head_dim)
    heads = min(triton.next_power_of_2(shape.q_heads), max(1, _COMBINED_VALUES // padded_dim))
    return {"HEADS": heads, "HEAD_DIM": shape.head_dim, "PADDED_DIM": padded_dim}


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


class TritonStep(StepBuffers):
    """A step like `CudaStep`: `load` when the plan is a new one, `prepare` once per step, `attend` for every layer.

    No address ever changes and the grids are fixed, so `attend` may be captured into CUDA graphs, once it has run
    with the same variant (types, layouts; with or without lse, sinks, cap, window): the first time compiles.

    Plans of any `DeviceModel` are run; those with `max_tile_rows=MAX_TILE_ROWS` fit best.

    Args:
        shape: attention shape; head_dim up to 256, best a power of two.
        dtype: of queries and output: bfloat16, float16 or float32. In float32 products cost several times as much.
        device: a GPU; or the CPU, if TRITON_INTERPRET=1 was set when this module was imported.
        limits: sizes of the buffers.
        kv_dtype: of KV: one of these, too, or float8_e4m3fn; None: `dtype`. Another 16-bit type than that of the
            queries costs as much as float32; of float8_e4m3fn every number is one of the queries' type as well.

    Raises:
        ValueError: an unsupported shape, type or device.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        limits: StepLimits,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 < shape.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {shape.head_dim}; the Triton kernels support 1 to {MAX_HEAD_DIM}")
        if shape.q_heads % shape.kv_heads:
            raise ValueError(f"{shape.q_heads} query heads are no multiple of {shape.kv_heads} KV heads")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; the Triton kernels support bfloat16, float16 and float32")
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            known = ", ".join(str(known) for known in KV_DTYPES)
            raise ValueError(f"kv_dtype is {kv_dtype}; the Triton kernels support {known}")
        if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
            raise ValueError(
                f"device is {device}; the Triton kernels run on a GPU, or on the CPU in Triton's interpreter if "
                "TRITON_INTERPRET=1 is set before Python starts"
            )
        super().__init__(shape, device, limits)
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self._records = self._ints(triton_kernels.RECORD_WORDS * limits.items)
        self._tile_counter = self._ints(1)
        self._num_stages = 2
        self.blocks = _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.blocks = 2 * properties.multi_processor_count
            shared = getattr(properties, "shared_memory_per_block_optin", 0)
            self._num_stages = 3 if shared >= _THREE_STAGES_FROM_BYTES else 2

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self.device.type == "cpu":
            yield
        else:
            with torch.cuda.device(self.device):
                yield

    def prepare(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: torch.Tensor | None = None,
    ) -> None:
        """Gathers the step's KV slots, ends and positions, so that the layers read nothing of the scheduler's.

        Args:
            req_to_token: int32 [rows, context] on the device.
            req_pool_indices: int64 [num_requests] on the device.
            seq_lens: int64 [num_requests] on the device, the step's own tokens included.
            visible: None; these kernels have no masks of trees.

        Raises:
            ValueError: a tensor of the wrong type, layout or device, or with fewer entries than the plan has
                requests; or masks.
        """
        if visible is not None:
            raise ValueError("the Triton kernels take no masks of visible positions")
        self._check_tables(req_to_token, req_pool_indices, seq_lens, None)
        with self._on_device():
            triton_kernels.prepare_step[(self.blocks,)](
                self._words, self._records, self._positions, self._kv_slots,
                req_to_token, req_to_token.stride(0), req_pool_indices, seq_lens, BLOCK=PREPARE_BLOCK,
            )  # fmt: skip

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        v_scale: float = 1.0,
        lse: torch.Tensor | None = None,
        logit_cap: float = 0.0,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer; arguments as in `core.attention.packed_attention`, the keys' scale within `scale`.

        Raises:
            ValueError: a tensor of the wrong shape, type or layout.
        """
        q_heads, kv_heads, head_dim = self.shape.q_heads, self.shape.kv_heads, self.shape.head_dim
        kv_dtype = self.kv_dtype
        for name, tensor, heads, dtype in (
            ("q", q, q_heads, self.dtype), ("k_cache", k_cache, kv_heads, kv_dtype),
            ("v_cache", v_cache, kv_heads, kv_dtype), ("out", out, q_heads, self.dtype),
        ):  # fmt: skip
            if tuple(tensor.shape[1:]) != (heads, head_dim) or tensor.dtype is not dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} [*, {heads}, {head_dim}]"
                )
            if tensor.stride(2) != 1:
                raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
        if lse is not None or sinks is not None:
            self._check_per_head(len(q), lse, sinks)
        product = torch.float32 if INTERPRETED else product_dtype(self.dtype, kv_dtype)
        fp8 = kv_dtype is torch.float8_e4m3fn
        if fp8:
            # Triton knows the type from compute capability 8.9 on only; the kernel takes bytes apart by itself.
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
            scale, v_scale = scale * E4M3_UNIT, v_scale * E4M3_UNIT
        lse_stride = 0 if lse is None else lse.stride(0)
        with self._on_device():
            triton_kernels.attend_packed[(self.blocks,)](
                self._words, self._records, self._positions, self._kv_slots, self._tile_counter,
                q, q.stride(0), q.stride(1),
                k_cache, k_cache.stride(0), k_cache.stride(1),
                v_cache, v_cache.stride(0), v_cache.stride(1),
                out, out.stride(0), out.stride(1),
                lse, lse_stride, sinks, self._partial_o, self._partial_lse,
                kv_heads, q_heads // kv_heads, scale, v_scale, logit_cap, window_left,
                **attend_constants(self.shape, product, logit_cap > 0.0, window_left >= 0, fp8=fp8),
                num_stages=self._num_stages,
            )  # fmt: skip
            triton_kernels.combine_partials[(self.blocks,)](
                self._words, self._partial_o, self._partial_lse,
                out, out.stride(0), out.stride(1), lse, lse_stride, sinks,
                q_heads, **combine_constants(self.shape),
            )  # fmt: skip
