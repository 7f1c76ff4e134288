"""A step that runs packed: its plans and the batch that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import KvTokens, Plan, grown_by
from sgl_prefix_attn.sglang_plugin.execution.drafts import is_chain
from sgl_prefix_attn.sglang_plugin.execution.layer_support import window_left
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

# A plan stays correct at any length because its tails are open-ended. Only its load balance drifts, slowly, as the
# tails grow. So a steady decode asks the planner once in this many steps.
STEPS_BETWEEN_PLANS = 8
NO_KV_TOKENS = KvTokens(0, 0, 0)


@dataclass(slots=True)
class PackedStep:
    """A step that runs packed: made with the metadata, read by every layer. Steady decode steps reuse the object.

    Attributes:
        paths: None for a step in a captured graph that was planned without sharing.
        num_tokens: rows of q.
        rows: [>= num_requests] contiguous int64, rows of `req_to_token`; a graph may pad behind the batch's requests.
        seq_lens: [>= num_requests] contiguous int64, KV lengths with the tokens of this step but for drafts; padded
            like `rows`.
        host_lens: [num_requests] int64 lengths that the planner saw last, in memory that nothing else writes.
        plans: one for each shape index.
        drafts: of each request in a verify step; 0 in others.
        trees: whether the drafts are trees.
        draft_mask: SGLang's mask of trees of drafts; None once the executor has read it. The step may outlive the
            forward, and the mask has a row over the whole KV for each draft.
        in_graph: whether a captured graph runs the layers.
        may_be_padded: whether q may have more rows than the step. A prefill graph runs attention between its pieces
            on padded rows.
        kv_tokens: KV reads of the step that the planner saw last.
        age: steps since then.
    """

    paths: StepPaths | None
    forward_mode: Any
    num_tokens: int
    rows: torch.Tensor
    seq_lens: torch.Tensor
    host_lens: Int64Array
    plans: list[Plan]
    in_graph: bool = False
    may_be_padded: bool = False
    kv_tokens: KvTokens = NO_KV_TOKENS
    age: int = 0
    drafts: int = 0
    trees: bool = False
    draft_mask: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        forward_batch: Any,
        paths: StepPaths | None,
        num_tokens: int,
        host_lens: Int64Array,
        plans: list[Plan],
        *,
        in_graph: bool,
        drafts: int | None = None,
    ) -> PackedStep:
        """The step of a ForwardBatch. drafts: of each request, in a verify step."""
        rows, seq_lens = _as_int64(forward_batch.req_pool_indices), _as_int64(forward_batch.seq_lens)
        step = cls(paths, forward_batch.forward_mode, num_tokens, rows, seq_lens, host_lens, plans, in_graph)
        if drafts is not None:
            info = forward_batch.spec_info
            step.drafts, step.trees = drafts, not is_chain(info)
            step.draft_mask = info.custom_mask if step.trees else None
        return step

    def continues_with(self, forward_batch: Any, handed: Handed, in_graph: bool) -> bool:
        """Takes over a decode batch with the same paths. Returns False if the planner has to see the batch.

        Every request must have grown by one token for each step since the planner saw it. Where other backends run
        some steps of the same requests, tails outgrow the room that the plan was loaded with, without any error.
        """
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if (
            self.age + 1 >= STEPS_BETWEEN_PLANS
            or self.paths is None
            or self.paths.query_lens is not None
            or in_graph is not self.in_graph
            or forward_batch.forward_mode is not self.forward_mode
            or (forward_batch.batch_size != self.paths.num_requests and not in_graph)
            or forward_batch.batch_size < self.paths.num_requests
            or forward_batch.spec_info is not None
            or getattr(forward_batch, "tbo_parent_token_range", None) is not None
            or not _is_int64(rows)
            or not _is_int64(seq_lens)
            or handed.seq_lens is None
            # Native: numpy takes 50 to 80 us longer where the model has evicted its code from the caches.
            or not grown_by(handed.seq_lens.numpy(), self.host_lens, self.age + 1)
        ):
            return False
        self.rows, self.seq_lens = rows, seq_lens
        self.age += 1
        return True

    def unsupported_call(self, q: torch.Tensor | None, layer: Any, kwargs: dict[str, Any]) -> Reason | None:
        """The reason why one call of a layer cannot run packed, None if it can."""
        if self.trees and window_left(layer) >= 0:  # positions of a tree are not those of its slots
            return fallback_reasons.SPECULATIVE_TREE
        if kwargs and any(value is not None and name != "sinks" for name, value in kwargs.items()):
            return fallback_reasons.CALL_ARGUMENTS
        if q is None:
            return fallback_reasons.ROW_MISMATCH
        row = layer.tp_q_head_num * layer.qk_head_dim
        missing = self.num_tokens * row - q.numel()
        if missing and not (self.may_be_padded and missing < 0 and missing % row == 0):
            return fallback_reasons.ROW_MISMATCH
        return None


def _is_int64(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read a tensor of rows or lengths."""
    return tensor.dtype is torch.int64 and tensor.is_contiguous()


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous int64, else a converted copy."""
    return tensor if _is_int64(tensor) else tensor.to(torch.int64).contiguous()
