"""Device memory of packed steps, whichever kernels run them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn._native import Plan, SerializedPlan
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import ModelShape

DECODE_WARPS = 8  # most warps of a CTA of the warp kernel

_STAGING_BUFFERS = 2


class PlanTooLarge(ValueError):  # noqa: N818 (an expected answer: the step runs elsewhere)
    """A plan that does not fit the buffers or the kernels; the message names the limit and the need."""


@dataclass(frozen=True)
class StepLimits:
    """Capacities of a step's buffers.

    Attributes:
        queries: query tokens of a step.
        items: work items of a plan.
        kv_slots: KV slots of all items together, including room for growing tails.
        partials: partial results.
    """

    queries: int
    items: int
    kv_slots: int
    partials: int

    @property
    def combine_lists(self) -> int:
        """Lists of partial results that the CUDA kernels combine: no plan within the other limits has more."""
        return _native.most_combine_lists(queries=self.queries, partials=self.partials)


def serialize_plan(
    plan: Plan,
    seq_lens: Int64Array,
    growth: int,
    shape: ModelShape,
    warp_ctas: int = 0,
    cta_warps: int = DECODE_WARPS,
) -> SerializedPlan:
    """A plan as the device reads it (csrc/cuda/serialize_plan.h).

    Args:
        plan: made for `shape`.
        seq_lens: [num_requests] int64, the lengths the plan was made for.
        growth: tokens by which tails may grow.
        shape: attention shape.
        warp_ctas: CTAs of the launch whose warps take work tiles of their own and deferred combines.
        cta_warps: warps of each.

    Raises:
        PlanTooLarge: more than 2^31 - 1 KV slots.
        ValueError: lengths of another batch.
    """
    try:
        return _native.serialize_plan(
            plan, seq_lens, growth=growth, group=shape.group, kv_heads=shape.kv_heads, warp_ctas=warp_ctas,
            cta_warps=cta_warps,
        )  # fmt: skip
    except OverflowError as overflow:
        raise PlanTooLarge(str(overflow)) from overflow


class StepBuffers:
    """Device buffers at fixed addresses: a plan's words, a step's positions and KV slots, partial results.

    Args:
        shape: attention shape.
        device: a GPU, or the CPU for interpreted kernels.
        limits: sizes of the buffers.
    """

    def __init__(self, shape: ModelShape, device: torch.device, limits: StepLimits) -> None:
        self.shape, self.device, self.limits = shape, device, limits
        self._int_buffers: list[torch.Tensor] = []
        self.warp_ctas = 0  # CTAs of a launch whose warps take work tiles of their own
        self.cta_warps = DECODE_WARPS  # warps of each
        num_words = _native.most_plan_words(queries=limits.queries, items=limits.items, partials=limits.partials)
        self._words = self._ints(num_words)
        self._positions = self._ints(limits.queries)
        self._kv_slots = self._ints(limits.kv_slots)
        self._partial_o = torch.empty(limits.partials, shape.q_heads, shape.head_dim, device=device)
        self._partial_lse = torch.empty(limits.partials, shape.q_heads, device=device)
        # The host runs ahead of a GPU: a staging buffer is written again only after its last copy.
        on_gpu = device.type != "cpu"
        self._staging = [torch.empty(num_words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_STAGING_BUFFERS)]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(_STAGING_BUFFERS)]
        self._turn = 0
        self._loaded = (0, 0)  # requests and queries of the plan on the device

    def _ints(self, count: int) -> torch.Tensor:
        self._int_buffers.append(torch.zeros(count, dtype=torch.int32, device=self.device))
        return self._int_buffers[-1]

    def reset(self) -> None:
        """Makes the buffers as new, at the same addresses, after their memory lost its content.

        The next step has to load its plan.
        """
        for buffer in self._int_buffers:
            buffer.zero_()

    def load(self, plan: Plan, seq_lens: Int64Array, growth: int) -> None:
        """Copies a plan to the device.

        Args:
            plan: made for this shape.
            seq_lens: [num_requests] int64 on the host, the lengths the plan was made for.
            growth: tokens by which tails may grow before another plan is loaded.

        Raises:
            PlanTooLarge: the buffers are unchanged.
        """
        made = serialize_plan(plan, seq_lens, growth, self.shape, self.warp_ctas, self.cta_warps)
        for name, needed in (
            ("queries", plan.num_queries),
            ("items", len(plan.items)),
            ("kv_slots", made.kv_slots),
            ("partials", plan.num_partials),
            ("combine_lists", made.combine_lists),
        ):
            limit = getattr(self.limits, name)
            if needed > limit:
                raise PlanTooLarge(f"the plan needs {needed} {name}; the buffers hold {limit}")
        self._loaded = (plan.num_requests, plan.num_queries)
        self._turn = (self._turn + 1) % _STAGING_BUFFERS
        staging, copied = self._staging[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        words = made.words
        staging.numpy()[: len(words)] = words
        self._words[: len(words)].copy_(staging[: len(words)], non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self.device))

    def _check_tables(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> None:
        """ValueError unless `prepare` can read the scheduler's tables for the plan: types, layouts, device, entries."""
        requests, queries = self._loaded
        self._check_table("req_to_token", req_to_token, torch.int32, 2, 0)
        self._check_table("req_pool_indices", req_pool_indices, torch.int64, 1, requests)
        self._check_table("seq_lens", seq_lens, torch.int64, 1, requests)
        if visible is not None:
            self._check_table("visible", visible, torch.int64, 1, queries)

    def _check_table(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int, entries: int) -> None:
        contiguous = tensor.dim() == dims and (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
        if tensor.dtype is not dtype or tensor.device != self.device or not contiguous:
            raise ValueError(
                f"{name} must be a contiguous {dtype} tensor of {dims} dimension{'s' * (dims > 1)} on {self.device}"
            )
        if tensor.shape[0] < entries:
            raise ValueError(f"{name} has {tensor.shape[0]} entries; the plan needs {entries}")

    def _check_per_head(self, tokens: int, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> None:
        """ValueError unless `attend` can write lse and read sinks: types, shapes, layouts, device."""
        q_heads = self.shape.q_heads
        for name, tensor, shape in (("lse", lse, (tokens, q_heads)), ("sinks", sinks, (q_heads,))):
            if tensor is None:
                continue
            fits = tensor.dtype is torch.float32 and tuple(tensor.shape) == shape and tensor.device == self.device
            if not fits or (tensor.stride(-1) != 1 and q_heads > 1):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected float32 {shape} on "
                    f"{self.device}, with heads one behind the other"
                )
