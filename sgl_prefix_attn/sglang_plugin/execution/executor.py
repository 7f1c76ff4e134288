"""The interface between dispatch, which decides what runs packed, and the code that runs it on one device."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import Plan, Planner
from sgl_prefix_attn.sglang_plugin.execution.layer_support import KvScales
from sgl_prefix_attn.sglang_plugin.execution.packed_step import PackedStep
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason


class Executor(Protocol):
    """Runs packed steps on one device. Owns the planners and all device memory that plans need.

    Each attention shape of the model (head counts, head size, KV type) has a shape index. Layers of the same shape
    share a planner, a plan and buffers.

    Attributes:
        planners: one for each shape index; the list object never changes.
        kernels: name of the packed kernels: native, triton or cpu.
        runs_in_graphs: whether captured graphs may hold packed layers.
        reads_trees: whether kernels read masks of visible drafts.
        judges_mixed: whether mixed steps run packed only if their requests share enough.
        drafts: of each request in a verify step, the last accepted token included; 1 without speculation.
    """

    planners: list[Planner]
    kernels: str
    runs_in_graphs: bool
    reads_trees: bool
    judges_mixed: bool
    drafts: int

    def reserve_graphs(self, max_batch: int, max_tokens: int) -> None:
        """Called once, before `shape_index`, if graphs will be captured; the arguments are those of the largest."""

    def why_stock(self, mode: Mode) -> Reason | None:
        """The reason why steps of this kind do not run packed, None if they do."""

    def unsupported_reason(self, layer: Any, k_cache: torch.Tensor) -> Reason | None:
        """The reason why a supported kind of layer does not run on this device, None if it does."""

    def unsupported_call(self, shape_index: int, q: torch.Tensor) -> Reason | None:
        """The reason why one call of a layer cannot run packed, None if it can."""

    def shape_index(self, layer: Any, k_cache: torch.Tensor) -> int:
        """The shape index of a layer. The first layer of a shape allocates its planner and buffers.

        Raises:
            torch.OutOfMemoryError: no device memory for the buffers.
        """

    def seal(self) -> None:
        """Called when all layers of the model are known. A step may run from here on, so no shape is added."""

    def host_lens(self, forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
        """[count] copy of the lengths of the first `count` requests; None if the batch is not the one handed over."""

    def unshared(self, host_lens: Int64Array, query_lens: Int64Array | None = None) -> list[Plan]:
        """Plans without sharing, one for each shape index: every request reads its own KV.

        Args:
            host_lens: [requests] KV lengths.
            query_lens: [requests] new tokens; None: one each.
        """

    def begin(self, step: PackedStep) -> None:
        """Makes a step ready for its layers.

        Raises:
            PlanTooLarge: a plan does not fit the buffers on the device.
        """

    def memory_resumed(self) -> None:
        """Called when memory that SGLang had released is back, at its addresses and without its content."""

    def attend(
        self,
        step: PackedStep,
        shape_index: int,
        q: torch.Tensor,
        layer: Any,
        pool: Any,
        sinks: torch.Tensor | None,
        scales: KvScales,
    ) -> torch.Tensor:
        """The output of one layer, [rows of q, q heads * head dim]."""
