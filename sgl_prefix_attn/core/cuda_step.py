"""Runs plans on a CUDA device: one copy per plan, one launch per step, two per layer, at fixed addresses."""

from __future__ import annotations

import numpy as np
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn._native import Plan
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import TILE_ROWS, DeviceModel, ModelShape
from sgl_prefix_attn.core.step_buffers import DECODE_WARPS, PlanTooLarge, StepBuffers, StepLimits

HEAD_DIMS = (64, 128, 256)
DTYPES = {torch.bfloat16: 1, torch.float16: 2}
KV_DTYPES = DTYPES | {torch.float8_e4m3fn: 3}
MOST_PROLOGUES = 2048  # items whose first reads need none before them; with more items a step is long


def unsupported_combine(plan: Plan) -> str | None:
    """Why the kernels cannot combine a plan's partial results, in words; None if they can."""
    most = int(np.diff(plan.combine_offset).max(initial=0))
    if most <= _native.combine_room:
        return None
    return f"the plan has {most} partial results of one query; the GPU kernels combine at most {_native.combine_room}"


class CudaStep(StepBuffers):
    """Device memory of packed steps; may be captured into CUDA graphs, since no address ever changes.

    Order of a step: `load` when the plan is a new one, `prepare` once, `attend` for every layer. `load` and `prepare`
    stay outside captured graphs. All work goes to PyTorch's current stream.

    Args:
        shape: attention shape; head_dim 64, 128 or 256.
        dtype: of queries and output: bfloat16 or float16.
        device: the CUDA device.
        limits: sizes of the buffers.
        kv_dtype: of KV: `dtype` (None, the default) or float8_e4m3fn. Products with the latter are of float16; queries
            beyond its range count as its largest number.

    Raises:
        ValueError: an unsupported head size or type.
        RuntimeError: the native module was built without CUDA, or CUDA fails.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        limits: StepLimits,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if not _native.built_with_cuda:
            raise RuntimeError("sgl_prefix_attn was built without CUDA: install it where nvcc is found")
        if shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {shape.head_dim}; the GPU kernels support {HEAD_DIMS}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; the GPU kernels support bfloat16 and float16")
        kv_dtype = kv_dtype or dtype
        if kv_dtype not in (dtype, torch.float8_e4m3fn):
            raise ValueError(f"kv_dtype is {kv_dtype}; the GPU kernels support {dtype}, as queries, and float8_e4m3fn")
        with torch.cuda.device(device):
            self.launch_size = _native.cuda_launch_size(
                head_dim=shape.head_dim, dtype=DTYPES[dtype], kv_dtype=KV_DTYPES[kv_dtype]
            )
        super().__init__(shape, device, limits)
        self.warp_ctas = self.launch_size.warp_ctas
        self.cta_warps = self.launch_size.cta_warps or DECODE_WARPS  # 0: there is no warp kernel
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self._widest_tile = DeviceModel.gpu(1, head_dim=shape.head_dim, group=shape.group).tile_rows[-1]
        self._items = self._ints(_native.item_record_words * max(limits.items, self.launch_size.ctas))
        num_prologues = min(max(limits.items, self.launch_size.ctas), MOST_PROLOGUES)
        self._prologues = self._ints(_native.item_prologue_words * num_prologues)
        self._tile_counters = self._ints(_native.tile_counters)
        self._semaphores = self._ints(limits.combine_lists * shape.kv_heads * _native.head_halves(shape.group))
        self._hidden = torch.zeros(limits.queries, dtype=torch.int64, device=device)
        self._trees = False
        self._addresses = _native.StepAddresses(
            words=self._words.data_ptr(),
            items=self._items.data_ptr(),
            prologues=self._prologues.data_ptr(),
            query_position=self._positions.data_ptr(),
            kv_slots=self._kv_slots.data_ptr(),
            tile_counters=self._tile_counters.data_ptr(),
            semaphores=self._semaphores.data_ptr(),
            hidden=self._hidden.data_ptr(),
            num_prologues=num_prologues,
        )
        self._params = _native.AttentionParams(
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=DTYPES[dtype],
            kv_dtype=KV_DTYPES[kv_dtype],
        )
        self._params.partial_o = self._partial_o.data_ptr()
        self._params.partial_lse = self._partial_lse.data_ptr()
        # Strides and options of the last layer: they rarely differ between layers.
        self._layout: tuple[object, ...] | None = None

    def load(self, plan: Plan, seq_lens: Int64Array, growth: int) -> None:
        """Does what `StepBuffers.load` does.

        Raises:
            PlanTooLarge: also for tiles that the kernels do not have, and for more partial results of a query than they
                combine.
        """
        widest = int(plan.items[:, TILE_ROWS].max(initial=0))
        if widest > self._widest_tile:
            raise PlanTooLarge(
                f"the plan has tiles of {widest} rows; with head_dim {self.shape.head_dim} the GPU kernels have "
                f"at most {self._widest_tile}: see DeviceModel.gpu"
            )
        problem = unsupported_combine(plan)
        if problem is not None:
            raise PlanTooLarge(problem)
        super().load(plan, seq_lens, growth)

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
            visible: int64 [tokens] on the device, see `packed_attention`; None: no trees of drafts. A graph that was
                captured after a `prepare` with masks is replayed after one with masks only, and likewise without.

        Raises:
            ValueError: a tensor of the wrong type, layout or device, or with fewer entries than the plan has requests
                or query tokens.
        """
        self._check_tables(req_to_token, req_pool_indices, seq_lens, visible)
        self._trees = visible is not None
        _native.cuda_prepare(
            self._addresses,
            req_to_token=req_to_token.data_ptr(),
            req_to_token_stride=req_to_token.stride(0),
            req_pool_indices=req_pool_indices.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            visible=0 if visible is None else visible.data_ptr(),
            ctas=self.launch_size.ctas,
            stream=torch.cuda.current_stream(self.device).cuda_stream,
        )

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
        """Attention of one layer; arguments as in `core.attention.packed_attention`. `scale` includes the keys' scale.

        Raises:
            ValueError: a tensor of the wrong shape, type or layout, or a scale that is not positive.
        """
        if not scale > 0:  # maxima are taken before it is applied
            raise ValueError(f"scale is {scale}; the GPU kernels need a positive one")
        q_heads, kv_heads, head_dim = self.shape.q_heads, self.shape.kv_heads, self.shape.head_dim
        for name, tensor, heads, dtype in (
            ("q", q, q_heads, self.dtype),
            ("k_cache", k_cache, kv_heads, self.kv_dtype),
            ("v_cache", v_cache, kv_heads, self.kv_dtype),
            ("out", out, q_heads, self.dtype),
        ):
            if tuple(tensor.shape[1:]) != (heads, head_dim) or tensor.dtype is not dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} [*, {heads}, {head_dim}]"
                )
            # Copies move 16 bytes at a time.
            word = 16 // dtype.itemsize
            strides = tensor.stride()
            if strides[2] != 1 or strides[0] % word or strides[1] % word or tensor.data_ptr() % 16:
                raise ValueError(f"{name} has strides {strides}; expected rows of whole, aligned 16-byte words")
        if lse is not None or sinks is not None:
            self._check_per_head(len(q), lse, sinks)
        params = self._params
        q_strides, k_strides, v_strides, o_strides = q.stride(), k_cache.stride(), v_cache.stride(), out.stride()
        lse_stride = 0 if lse is None else lse.stride(0)
        layout = (
            q_strides, k_strides, v_strides, o_strides, lse_stride, scale, v_scale, logit_cap, window_left
        )  # fmt: skip
        if layout != self._layout:
            params.q_token_stride, params.q_head_stride = q_strides[:2]
            params.k_slot_stride, params.k_head_stride = k_strides[:2]
            params.v_slot_stride, params.v_head_stride = v_strides[:2]
            params.o_token_stride, params.o_head_stride = o_strides[:2]
            params.lse_token_stride = lse_stride
            params.window_left = window_left
            params.scale = scale
            params.v_scale = v_scale
            params.logit_cap = logit_cap
            self._layout = layout
        params.q = q.data_ptr()
        params.k = k_cache.data_ptr()
        params.v = v_cache.data_ptr()
        params.o = out.data_ptr()
        params.lse = 0 if lse is None else lse.data_ptr()
        params.sinks = 0 if sinks is None else sinks.data_ptr()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        _native.cuda_attend(self._addresses, params, self.launch_size, trees=self._trees, stream=stream)
