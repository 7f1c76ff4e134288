"""`packed_attention` on a GPU: which kernels run a call, and the buffers they keep between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn._native import Plan
from sgl_prefix_attn.core import cuda_step, planner
from sgl_prefix_attn.core.cuda_step import CudaStep
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.limits import unsupported_gpu, untested_gpu
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.core.step_buffers import StepLimits, serialize_plan

_SMALLEST_LIMIT = 256


class Step(Protocol):
    """The interface of `CudaStep` and `TritonStep`, which document it: a step is `load`, `prepare`, then `attend`."""

    def load(self, plan: Plan, seq_lens: Int64Array, growth: int) -> None:
        """See `StepBuffers.load`."""

    def prepare(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: torch.Tensor | None = None,
    ) -> None:
        """See `CudaStep.prepare`."""

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
        """See `CudaStep.attend`."""


MakeStep = Callable[[ModelShape, torch.dtype, torch.device, StepLimits, torch.dtype | None], Step]


class StepPool:
    """Steps by kernels, attention shape, types and device. A plan that needs more room gets a larger step."""

    def __init__(self) -> None:
        self._steps: dict[Any, tuple[StepLimits, Step]] = {}

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        plan: Plan,
        *,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: torch.Tensor | None = None,
        **variant: Any,
    ) -> None:
        """Loads the plan, prepares the step and runs one layer; `packed_attention` has checked its arguments.

        Args:
            q, k_cache, v_cache, out, plan: as of `packed_attention`.
            req_to_token, req_pool_indices, seq_lens, visible: as of `packed_attention`.
            variant: further arguments of `Step.attend`.

        Raises:
            ValueError: indices that lead outside a tensor.
            RuntimeError: no installed kernel supports the call.
        """
        host_lens = seq_lens.cpu().numpy()
        check_indices(
            plan, host_lens, req_pool_indices.cpu().numpy(),
            rows=req_to_token.shape[0], context=req_to_token.shape[1], num_tokens=len(q),
        )  # fmt: skip
        problem = why_not_native_call(plan, q, k_cache, v_cache, out)
        make_step: MakeStep = CudaStep if problem is None else _triton_step(problem)
        kv_dtype = k_cache.dtype
        shape = ModelShape(q.shape[1], k_cache.shape[1], q.shape[2], kv_bytes=kv_dtype.itemsize)
        key = (make_step, shape, q.dtype, kv_dtype, q.device)
        needed = limits_of(plan, host_lens, shape)
        limits, step = self._steps.get(key, (StepLimits(0, 0, 0, 0), None))
        if step is None or not _fits(needed, limits):
            limits = _with_room(needed, limits)
            step = make_step(shape, q.dtype, q.device, limits, kv_dtype)
            self._steps[key] = limits, step
        step.load(plan, host_lens, 0)
        step.prepare(req_to_token, req_pool_indices, seq_lens, visible)
        step.attend(q, k_cache, v_cache, out, **variant)


def why_not_native_call(
    plan: Plan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
) -> str | None:
    """Why the native CUDA kernels are not to run a call, in words; None if they are."""
    if not _native.built_with_cuda:
        return "sgl_prefix_attn was built without CUDA"
    if q.device.type != "cuda":
        return f"the native kernels run on NVIDIA GPUs, and {q.device} is none"
    problem = unsupported_gpu(q.device) or untested_gpu(q.device)
    if problem is not None:
        return problem
    head_dim = q.shape[2]
    if head_dim not in cuda_step.HEAD_DIMS:
        return f"the native kernels support head_dim {cuda_step.HEAD_DIMS}, not {head_dim}"
    if q.dtype not in cuda_step.DTYPES or k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return (
            "the native kernels take bfloat16 or float16 throughout, or over float8_e4m3fn, "
            f"not {q.dtype} over {k_cache.dtype}"
        )
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        words = 16 // tensor.dtype.itemsize
        if tensor.stride(0) % words or tensor.stride(1) % words or tensor.data_ptr() % 16:
            return f"the native kernels read whole, aligned 16-byte words; {name} has strides {tensor.stride()}"
    group = q.shape[1] // k_cache.shape[1]
    table = DeviceModel.gpu(1, head_dim=head_dim, group=group).tile_rows
    for rows in np.unique(plan.items[:, planner.TILE_ROWS]).tolist():
        if rows not in table:
            return f"the plan has tiles of {rows} rows, made for another device: see DeviceModel.gpu"
    return cuda_step.unsupported_combine(plan)


def _triton_step(problem: str) -> MakeStep:
    try:
        from sgl_prefix_attn.core.triton_step import TritonStep
    except ImportError as error:
        raise RuntimeError(f"no kernel for this call: {problem}; and triton cannot be imported: {error}") from error
    return TritonStep


def limits_of(plan: Plan, seq_lens: Int64Array, shape: ModelShape) -> StepLimits:
    """Buffer sizes for a plan at these lengths. Raises PlanTooLarge beyond 2^31 - 1 KV slots."""
    kv_slots = serialize_plan(plan, seq_lens, 0, shape).kv_slots
    return StepLimits(plan.num_queries, len(plan.items), kv_slots, plan.num_partials)


def _fits(needed: StepLimits, limits: StepLimits) -> bool:
    return all(getattr(needed, name) <= getattr(limits, name) for name in vars(needed))


def _with_room(needed: StepLimits, limits: StepLimits) -> StepLimits:
    """Limits rounded up to powers of two: buffers that grow with a batch are replaced a few times only."""
    sizes = {name: max(value, getattr(limits, name), _SMALLEST_LIMIT) for name, value in vars(needed).items()}
    return StepLimits(**{name: 1 << (size - 1).bit_length() for name, size in sizes.items()})


def check_indices(
    plan: Plan, seq_lens: Int64Array, req_pool_indices: Int64Array, *, rows: int, context: int, num_tokens: int
) -> None:
    """Finds indices that lead outside the tensors. The slots in req_to_token are on the GPU and stay unchecked.

    Args:
        rows, context: shape of req_to_token.

    Raises:
        ValueError: with the request or query, and the value.
    """
    _require_inside("request", "req_pool_indices", req_pool_indices, rows)
    _require_inside("request", "seq_lens", seq_lens, context + 1)
    _require_inside("query", "row of q", plan.query_token, num_tokens)
    lens = seq_lens[plan.query_request]
    _require_inside("query", "position", lens - 1 - plan.query_back, context)
    ends = plan.items[:, planner.KV_END]
    _require_inside("item", "last KV position", np.where(ends == planner.OPEN_END, 0, ends - 1), context)


def _require_inside(what: str, value_name: str, values: np.ndarray[Any, Any], limit: int) -> None:
    outside = np.flatnonzero((values < 0) | (values >= limit))
    if len(outside) > 0:
        index = int(outside[0])
        raise ValueError(
            f"{what} {index}: {value_name} is {int(values[index])}, but must be at least 0 and below {limit}"
        )
