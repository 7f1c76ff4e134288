"""Running a plan on the tensors of one attention layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.limits import HEAD_DIM_STEP, MAX_HEAD_DIM, head_dim_fits
from sgl_prefix_attn.core.step_pool import StepPool

_DEVICES = ("cpu", "cuda")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KV_DTYPES = {**_DTYPES, torch.float8_e4m3fn: 3}


class _Tensors(NamedTuple):
    """Types and layouts of the tensors of a layer."""

    q_shape: torch.Size
    k_shape: torch.Size
    dtype: torch.dtype
    kv_dtype: torch.dtype
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    o_strides: tuple[int, ...]


class _Layout(NamedTuple):
    """Layouts, sizes and options of a call on the CPU. They rarely differ between the layers of a model."""

    tensors: _Tensors
    lse_stride: int
    table_stride: int
    table_shape: torch.Size
    num_requests: int
    scale: float
    k_scale: float
    v_scale: float
    logit_cap: float
    window_left: int


class PartialWorkspace:
    """Memory for the partial results of a step. It grows to the need of the largest plan so far and never shrinks.

    One workspace serves all layers of a model, one call after the other; never two calls at once. On a GPU it also
    keeps the kernels' other buffers, and belongs to one stream.

    Attributes:
        layout: of the last call on the CPU, None before the first.
        tables: addresses of that call which usually stay the same over the layers of a step.
        params: native parameters of that call; the next call sets only what differs.
        sizes: tensor sizes of that call.
        steps: buffers of the GPU kernels.
    """

    __slots__ = ("_buffer", "layout", "params", "sizes", "steps", "tables")

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32)
        self.layout: _Layout | None = None
        self.tables: tuple[int, ...] | None = None
        self.params: _native.AttentionParams
        self.sizes: _native.TensorSizes
        self.steps = StepPool()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._buffer.numel() * self._buffer.element_size()

    def reserve(self, num_partials: int, q_heads: int, head_dim: int) -> tuple[int, int]:
        """Addresses of [num_partials, q_heads, head_dim] and [num_partials, q_heads] floats, contents undefined."""
        outputs = num_partials * q_heads * head_dim
        needed = outputs + num_partials * q_heads
        if needed > self._buffer.numel():
            self._buffer = torch.empty(needed, dtype=torch.float32)
        address = self._buffer.data_ptr()
        return address, address + 4 * outputs

    def set_layout(self, layout: _Layout) -> None:
        """Makes `params` and `sizes` anew for calls with this layout; addresses are not set."""
        tensors = layout.tensors
        num_tokens, q_heads, head_dim = tensors.q_shape
        kv_slots, kv_heads, _ = tensors.k_shape
        params = self.params = _native.AttentionParams(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=_DTYPES[tensors.dtype],
            kv_dtype=_KV_DTYPES[tensors.kv_dtype],
        )
        params.q_token_stride, params.q_head_stride = tensors.q_strides[:2]
        params.k_slot_stride, params.k_head_stride = tensors.k_strides[:2]
        params.v_slot_stride, params.v_head_stride = tensors.v_strides[:2]
        params.o_token_stride, params.o_head_stride = tensors.o_strides[:2]
        params.lse_token_stride = layout.lse_stride
        params.req_to_token_stride = layout.table_stride
        params.window_left = layout.window_left
        params.scale = layout.scale * layout.k_scale
        params.v_scale = layout.v_scale
        params.logit_cap = layout.logit_cap
        max_requests, max_context = layout.table_shape
        self.sizes = _native.TensorSizes(
            num_tokens=num_tokens,
            num_requests=layout.num_requests,
            max_requests=max_requests,
            max_context=max_context,
            kv_slots=kv_slots,
        )
        self.layout, self.tables = layout, None


def packed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: _native.Plan,
    *,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    workspace: PartialWorkspace | None = None,
    threads: int | None = None,
    isa: str = "",
) -> torch.Tensor:
    """Attention of every query of `plan` over the KV cache, shared positions read once per work item.

    On CPU tensors the CPU executor runs. On a GPU the native kernels run where this package was built with CUDA and
    they support the call (`core.cuda_step`), otherwise Triton's (`core.triton_step`). The same plan and inputs give the
    same bits, with any number of threads and again on the same GPU.

    On a GPU each call copies the plan to the device and waits for the lengths. That suits tests and offline use.
    Servers keep a step of `core.cuda_step` or `core.triton_step`, which loads plan and lengths once for all layers.

    Args:
        q: [tokens, q_heads, head_dim], float32, bfloat16 or float16; on the CPU or a GPU, as all other tensors.
        k_cache: [slots, kv_heads, head_dim], float32, bfloat16, float16 (need not be q's) or float8_e4m3fn, the last
            without rounding of queries, weights or sums to eight bits. q_heads is a multiple of kv_heads; head_dim a
            multiple of 16 up to 256. The innermost stride is 1, as for q, out and sinks; others are free.
        v_cache: as k_cache.
        plan: of the batch, made by `Planner`. A plan for another device gives the same result and costs time. On a GPU
            a plan whose tiles are not those of `DeviceModel.gpu` runs on Triton's kernels.
        req_to_token: int32 [rows, context], KV slot of a request's position.
        req_pool_indices: int64 [requests], row of req_to_token by batch index.
        seq_lens: int64 [requests], KV length with this step's own tokens.
        scale: factor of q.k before the softmax.
        k_scale: positive factor of all stored keys, as for an 8-bit cache that was divided by it; allowed with every
            type.
        v_scale: positive factor of all stored values.
        out: written and returned; default a new tensor. Rows that the plan does not name stay as they are.
        lse: float32 [tokens, q_heads] to be filled, or None: natural logarithm of the softmax denominator, the sink
            included (as FlashInfer and FlashAttention 3 count it).
        logit_cap: scores become logit_cap * tanh(score / logit_cap); 0 for none.
        window_left: positions before its own that a query sees; negative for all.
        sinks: float32 [q_heads], a logit per head that takes part in the denominator only.
        visible: int64 [tokens], 64 bits for each query: bit j is set if it sees the position j before its own. It sees
            all positions before these. For trees of drafts; not with Triton's kernels. None: all positions up to its
            own.
        workspace: reused between calls, so that they allocate nothing; default a new one.
        threads: of the CPU executor; default torch.get_num_threads().
        isa: of the CPU executor, one of `sgl_prefix_attn._native.cpu_isas()`, for tests and measurements; default the
            best.

    Returns:
        out, [tokens, q_heads, head_dim] of q's dtype.

    Raises:
        TypeError, ValueError: for a tensor of the wrong dtype, shape, layout or device, and for indices in the plan,
            req_pool_indices, seq_lens or, on the CPU, req_to_token that lead outside a tensor.
        RuntimeError: on a GPU, if no installed kernel supports the call.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    device = q.device
    if device.type not in _DEVICES:
        raise ValueError(f"q is on {device}; packed_attention runs on CPU and CUDA tensors")
    tensors = _checked_tensors(q, k_cache, v_cache, out)
    _check_tables(plan, req_to_token, req_pool_indices, seq_lens, device)
    num_tokens, q_heads, head_dim = tensors.q_shape
    lse_address, lse_stride, sinks_address, visible_address = 0, 0, 0, 0
    if lse is not None:
        _check_per_head("lse", lse, (num_tokens, q_heads), device)
        lse_address, lse_stride = lse.data_ptr(), lse.stride(0)
    if sinks is not None:
        _check_per_head("sinks", sinks, (q_heads,), device)
        sinks_address = sinks.data_ptr()
    if visible is not None:
        _check_indices("visible", visible, torch.int64, 1, device)
        if visible.shape[0] != num_tokens:
            raise ValueError(f"visible has {visible.shape[0]} entries; expected {num_tokens}")
        visible_address = visible.data_ptr()
    _check_factors(scale, k_scale, v_scale, logit_cap)
    if workspace is None:
        workspace = PartialWorkspace()
    if device.type != "cpu":
        with torch.cuda.device(device):  # kernels run on the current one
            workspace.steps.run(
                q, k_cache, v_cache, out, plan,
                req_to_token=req_to_token, req_pool_indices=req_pool_indices, seq_lens=seq_lens,
                scale=scale * k_scale, v_scale=v_scale, lse=lse, logit_cap=logit_cap,
                window_left=max(window_left, -1), sinks=sinks, visible=visible,
            )  # fmt: skip
        return out
    if threads is None:
        threads = torch.get_num_threads()
    if threads < 1:
        raise ValueError(f"threads is {threads}; expected at least 1")
    num_partials = plan.num_partials
    partial_o, partial_lse = workspace.reserve(num_partials, q_heads, head_dim) if num_partials else (0, 0)
    layout = _Layout(
        tensors, lse_stride, req_to_token.stride(0), req_to_token.shape, seq_lens.shape[0], scale, k_scale, v_scale,
        logit_cap, max(window_left, -1),
    )  # fmt: skip
    if layout != workspace.layout:
        workspace.set_layout(layout)
    params = workspace.params
    params.q = q.data_ptr()
    params.k = k_cache.data_ptr()
    params.v = v_cache.data_ptr()
    params.o = out.data_ptr()
    tables = (
        req_to_token.data_ptr(), req_pool_indices.data_ptr(), seq_lens.data_ptr(), partial_lse, lse_address,
        sinks_address, partial_o, visible_address,
    )  # fmt: skip
    if tables != workspace.tables:
        params.req_to_token, params.req_pool_indices, params.seq_lens = tables[:3]
        params.partial_o, params.partial_lse = partial_o, partial_lse
        params.lse, params.sinks, params.visible = lse_address, sinks_address, visible_address
        workspace.tables = tables
    _native.run_plan_cpu(plan, params, workspace.sizes, threads=threads, isa=isa)
    return out


def _checked_tensors(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> _Tensors:
    """What the tensors are; raises for devices, types, shapes and strides of no kernel."""
    device = q.device
    if not (k_cache.device == v_cache.device == out.device == device):
        _refuse_devices(device, k_cache=k_cache, v_cache=v_cache, out=out)
    dtype, kv_dtype = q.dtype, k_cache.dtype
    if dtype not in _DTYPES or kv_dtype not in _KV_DTYPES or v_cache.dtype is not kv_dtype or out.dtype is not dtype:
        _refuse_dtypes(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    q_shape, k_shape = q.shape, k_cache.shape
    if len(q_shape) != 3 or len(k_shape) != 3 or v_cache.shape != k_shape or out.shape != q_shape:
        _refuse_shapes(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    _, q_heads, head_dim = q_shape
    _, kv_heads, kv_head_dim = k_shape
    if kv_head_dim != head_dim:
        raise ValueError(f"q has head_dim {head_dim} but k_cache has {kv_head_dim}")
    if not head_dim_fits(head_dim):
        raise ValueError(f"head_dim is {head_dim}; expected a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}")
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads, which is no multiple of the {kv_heads} heads of k_cache")
    q_strides, k_strides, v_strides, o_strides = q.stride(), k_cache.stride(), v_cache.stride(), out.stride()
    if not q_strides[2] == k_strides[2] == v_strides[2] == o_strides[2] == 1:
        _refuse_strides(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    return _Tensors(q_shape, k_shape, dtype, kv_dtype, q_strides, k_strides, v_strides, o_strides)


def _check_tables(
    plan: _native.Plan,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    device: torch.device,
) -> None:
    """Raises unless the scheduler's tables have the types and the device of a call, and a row for each request."""
    _check_indices("req_to_token", req_to_token, torch.int32, 2, device)
    _check_indices("req_pool_indices", req_pool_indices, torch.int64, 1, device)
    _check_indices("seq_lens", seq_lens, torch.int64, 1, device)
    num_requests = seq_lens.shape[0]
    if req_pool_indices.shape[0] != num_requests:
        raise ValueError(f"req_pool_indices has {req_pool_indices.shape[0]} entries but seq_lens has {num_requests}")
    if plan.num_requests != num_requests:
        raise ValueError(f"the plan is for {plan.num_requests} requests but seq_lens has {num_requests} entries")


def _check_factors(scale: float, k_scale: float, v_scale: float, logit_cap: float) -> None:
    if not 0.0 <= logit_cap < math.inf:
        raise ValueError(f"logit_cap is {logit_cap}; expected a positive, finite number, or 0 for no cap")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; expected a finite number")
    if not (0.0 < k_scale < math.inf and 0.0 < v_scale < math.inf):
        name, value = ("v_scale", v_scale) if 0.0 < k_scale < math.inf else ("k_scale", k_scale)
        raise ValueError(f"{name} is {value}; expected a positive, finite number")


def _check_indices(name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int, device: torch.device) -> None:
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {dims} dimension{'s' * (dims > 1)}")
    if tensor.device != device:
        _refuse_devices(device, **{name: tensor})
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")


def _check_per_head(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected torch.float32")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.device != device:
        _refuse_devices(device, **{name: tensor})
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")


def _refuse_devices(device: torch.device, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} but q is on {device}")


def _refuse_dtypes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> None:
    for name, tensor, known in (("q", q, _DTYPES), ("k_cache", k_cache, _KV_DTYPES)):
        if tensor.dtype not in known:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; expected one of {', '.join(str(dtype) for dtype in known)}"
            )
    for name, tensor, other_name, other in (("v_cache", v_cache, "k_cache", k_cache), ("out", out, "q", q)):
        if tensor.dtype is not other.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} but {other_name} has {other.dtype}")


def _refuse_shapes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> None:
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected [tokens, q_heads, head_dim]")
    if k_cache.dim() != 3:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}; expected [slots, kv_heads, head_dim]")
    for name, tensor, other_name, other in (("v_cache", v_cache, "k_cache", k_cache), ("out", out, "q", q)):
        if tensor.shape != other.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} but {other_name} has {tuple(other.shape)}")


def _refuse_strides(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
