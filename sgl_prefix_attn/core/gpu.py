"""Running plans on a CUDA device: one copy per plan, one launch per step, one per layer, all at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn._native import Plan
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import ModelShape

HEAD_DIMS = (64, 128, 256)
DTYPES = {torch.bfloat16: 1, torch.float16: 2}
_STAGING_BUFFERS = 2


class PlanTooLarge(ValueError):  # noqa: N818 (it is an answer, not a fault: the step runs elsewhere)
    """A plan that does not fit the buffers; the message says which limit and by how much."""


@dataclass(frozen=True)
class StepLimits:
    """What the buffers of a `GpuStep` hold at most.

    Attributes:
        queries: query tokens of a step.
        items: work items of a plan.
        kv_slots: KV slots of all items together, with room for growing tails.
        partial_slots: partial results.
    """

    queries: int
    items: int
    kv_slots: int
    partial_slots: int


class GpuStep:
    """Device memory of packed steps; may be captured into CUDA graphs, since no address ever changes.

    Order of a step: `load` when the plan is a new one, `prepare` once, `attend` for every layer. `load` and `prepare`
    stay outside captured graphs. All work goes to PyTorch's current stream.

    Args:
        shape: attention shape; head_dim 64, 128 or 256.
        dtype: of queries, output and KV: bfloat16 or float16.
        device: the CUDA device.
        limits: sizes of the buffers.

    Raises:
        ValueError: an unsupported head size or type.
        RuntimeError: the native module was built without CUDA, or CUDA fails.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device, limits: StepLimits) -> None:
        if not _native.built_with_cuda:
            raise RuntimeError("sgl_prefix_attn was built without CUDA: install it where nvcc is found")
        if shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {shape.head_dim}; the GPU kernels support {HEAD_DIMS}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; the GPU kernels support bfloat16 and float16")
        self.shape, self.dtype, self.device, self.limits = shape, dtype, device, limits
        with torch.cuda.device(device):
            self.blocks = _native.cuda_resident_blocks(shape.head_dim, DTYPES[dtype])
        num_words = 12 + 9 * limits.items + 5 * limits.queries + limits.partial_slots + 1
        self._words = self._ints(num_words)
        self._items = self._ints(11 * limits.items)
        self._positions = self._ints(limits.queries)
        self._kv_slots = self._ints(limits.kv_slots)
        self._tickets = self._ints(3)
        self._arrivals = self._ints(limits.queries * shape.kv_heads)
        self._partial_o = torch.empty(limits.partial_slots, shape.q_heads, shape.head_dim, device=device)
        self._partial_lse = torch.empty(limits.partial_slots, shape.q_heads, device=device)
        # The host runs ahead of the device: a buffer is written again only when its last copy is over.
        self._staging = [torch.empty(num_words, dtype=torch.int32, pin_memory=True) for _ in range(_STAGING_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGING_BUFFERS)]
        self._turn = 0
        self._addresses = _native.StepAddresses(
            words=self._words.data_ptr(),
            items=self._items.data_ptr(),
            query_position=self._positions.data_ptr(),
            kv_slots=self._kv_slots.data_ptr(),
            tickets=self._tickets.data_ptr(),
            arrivals=self._arrivals.data_ptr(),
        )

    def _ints(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def load(self, plan: Plan, seq_lens: Int64Array, growth: int) -> None:
        """Brings a plan to the device.

        Args:
            plan: made for this shape.
            seq_lens: [num_requests] int64 on the host, the lengths the plan was made for.
            growth: tokens by which tails may grow before another plan is loaded.

        Raises:
            PlanTooLarge: nothing was changed.
        """
        words, kv_slots = _native.plan_words(plan, seq_lens, growth)
        for name, needed in (
            ("queries", plan.num_queries),
            ("items", len(plan.items)),
            ("kv_slots", kv_slots),
            ("partial_slots", plan.num_slots),
        ):
            limit = getattr(self.limits, name)
            if needed > limit:
                raise PlanTooLarge(f"the plan needs {needed} {name}; the buffers hold {limit}")
        self._turn = (self._turn + 1) % _STAGING_BUFFERS
        staging, copied = self._staging[self._turn], self._copied[self._turn]
        copied.synchronize()
        staging.numpy()[: len(words)] = words
        self._words[: len(words)].copy_(staging[: len(words)], non_blocking=True)
        copied.record()

    def prepare(self, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Gathers the step's KV slots, ends and positions, so that the layers read nothing of the scheduler's.

        Args:
            req_to_token: int32 [rows, context] on the device.
            req_pool_indices: int64 [num_requests] on the device.
            seq_lens: int64 [num_requests] on the device, the step's own tokens included.
        """
        for name, tensor, dtype in (
            ("req_to_token", req_to_token, torch.int32),
            ("req_pool_indices", req_pool_indices, torch.int64),
            ("seq_lens", seq_lens, torch.int64),
        ):
            if tensor.dtype is not dtype or tensor.device != self.device or tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be a contiguous {dtype} tensor on {self.device}")
        _native.cuda_prepare(
            self._addresses, req_to_token.data_ptr(), req_to_token.stride(0), req_pool_indices.data_ptr(),
            seq_lens.data_ptr(), self.blocks, torch.cuda.current_stream(self.device).cuda_stream,
        )

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        lse: torch.Tensor | None = None,
        logit_cap: float = 0.0,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer; arguments as in `core.attention.packed_attention`.

        Raises:
            ValueError: a tensor of the wrong shape, type or layout.
        """
        q_heads, kv_heads, head_dim = self.shape.q_heads, self.shape.kv_heads, self.shape.head_dim
        for name, tensor, heads in (
            ("q", q, q_heads), ("k_cache", k_cache, kv_heads), ("v_cache", v_cache, kv_heads), ("out", out, q_heads),
        ):
            if tuple(tensor.shape[1:]) != (heads, head_dim) or tensor.dtype is not self.dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {self.dtype} [*, {heads}, {head_dim}]"
                )
            # Copies move 16 bytes at a time.
            if tensor.stride(2) != 1 or tensor.stride(0) % 8 or tensor.stride(1) % 8 or tensor.data_ptr() % 16:
                raise ValueError(f"{name} has strides {tensor.stride()}; expected rows of whole, aligned 16-byte words")
        _native.cuda_attend(
            self._addresses,
            q.data_ptr(), q.stride(0), q.stride(1),
            k_cache.data_ptr(), k_cache.stride(0), k_cache.stride(1),
            v_cache.data_ptr(), v_cache.stride(0), v_cache.stride(1),
            out.data_ptr(), out.stride(0), out.stride(1),
            0 if lse is None else lse.data_ptr(), 0 if lse is None else lse.stride(0),
            0 if sinks is None else sinks.data_ptr(),
            self._partial_o.data_ptr(), self._partial_lse.data_ptr(),
            DTYPES[self.dtype], q_heads, kv_heads, head_dim, window_left, scale, logit_cap,
            self.blocks, torch.cuda.current_stream(self.device).cuda_stream,
        )  # fmt: skip
