"""Packed steps on CUDA: device buffers for each attention shape, and decode inside captured graphs.

A captured graph holds the launches of the layers and the addresses of the buffers, but no plan. Work before each
replay, on SGLang's forward stream, fills the buffers: the plan if it is a new one, and by one small kernel the KV
slots and lengths of the step.

Overlap scheduling: while a step runs, the scheduler writes `req_to_token` for the next step on its own stream. It
starts as soon as this step has read the table. Packed steps read the table in the small kernel only, before the
replay; layers read the copies. SGLang 0.5.14 to 0.5.17 records its "reads are done" event between the two. Later
versions ask `shared_read_ends`.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sgl_prefix_attn.core.cuda_step import unsupported_combine
from sgl_prefix_attn.core.draft_tables import DraftTables
from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import ModelShape, Plan, Planner
from sgl_prefix_attn.core.step_buffers import StepLimits
from sgl_prefix_attn.routing import mixed
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.execution.buffer_sizes import LargestSteps, step_limits
from sgl_prefix_attn.sglang_plugin.execution.drafts import packs_by_default, why_no_packed_verify
from sgl_prefix_attn.sglang_plugin.execution.kernel_set import Kernels
from sgl_prefix_attn.sglang_plugin.execution.layer_support import FP8, KvScales, layer_shape, window_left
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS, PackedStep
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

logger = logging.getLogger(__name__)


@dataclass
class _ShapeState:
    """Planners and device memory of one attention shape.

    Attributes:
        dtype, kv_dtype: type of queries and output, and of KV.
        step: the device buffers, a `CudaStep` or an object with its interface.
        planner: plans batches with known sharing.
        unshared: plans batches without sharing.
        no_split: as `unshared`, but never splits the KV of a request; needs the smallest buffers.
        loaded: the plan on the device. The reference keeps its identity unique.
        graph_out: [rows of the largest graph, q heads * head dim] output of the layers of captured graphs.
    """

    shape: ModelShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    step: Any
    planner: Planner
    unshared: Planner
    no_split: Planner
    graph_out: torch.Tensor
    loaded: Plan | None = None


class CudaExecutor:
    """Runs plans on one CUDA device; see `Executor`.

    Args:
        settings: settings in force.
        kernels: the kernels to run.
        stock: the stock backend's name.
    """

    runs_in_graphs = True

    def __init__(self, facts: ServerFacts, settings: Settings, kernels: Kernels, stock: str) -> None:
        self.planners: list[Planner] = []
        self.kernels = kernels.name
        self.reads_trees = kernels.reads_trees
        self.drafts = facts.drafts
        self._speculates = facts.speculates
        self._settings = settings
        self._kernels = kernels
        self._model_dtype = facts.dtype
        self._req_to_token_pool = facts.req_to_token_pool
        # Not where `route` switches packing off.
        judges = settings.pack_mixed == "auto" and settings.policy.fixed != "stock"
        self.judges_mixed = judges and _may_gain_in_mixed(facts, kernels)
        packs_mixed = settings.pack_mixed is True and not self._speculates
        self._packs_prefill = settings.pack_extend is True or packs_mixed
        self._prefill_tokens = _most_prefill_tokens(facts) if self._packs_prefill or self.judges_mixed else 0
        self._no_verify = why_no_packed_verify(facts, kernels.reads_trees)
        if settings.pack_verify == "auto":
            by_default = packs_by_default(facts, kernels.name, stock)
            why_not = fallback_reasons.SPECULATIVE if settings.pack_decode else fallback_reasons.DISABLED
            self._no_verify = self._no_verify or (None if by_default and settings.pack_decode else why_not)
        # Tokens that a tail may grow under one plan: the planner replans at `replan_growth`, but sees few steps.
        self._growth = settings.replan_growth + STEPS_BETWEEN_PLANS
        self._graph_batch = 0
        self._graph_tokens = 0
        self._shapes: list[_ShapeState] = []
        self._draft_tables: DraftTables | None = None
        self._sealed = False
        self._unshared_forests: dict[int, PrefixForest] = {}

    # Before the first step ------------------------------------------------------------------------------------------

    def reserve_graphs(self, max_batch: int, max_tokens: int) -> None:
        if max_batch <= self._graph_batch and max_tokens <= self._graph_tokens:
            return
        self._graph_batch = max(max_batch, self._graph_batch)
        self._graph_tokens = max(max_tokens, self._graph_tokens)
        self._draft_tables = None
        # SGLang captures all its graphs after this, so no graph holds the addresses of earlier buffers.
        for state in self._shapes:
            self._reallocate(state)

    def why_stock(self, mode: Mode) -> Reason | None:
        wanted = getattr(self._settings, f"pack_{mode}")
        if not wanted:
            return fallback_reasons.DISABLED
        if mode == "verify":
            return self._no_verify
        if mode == "mixed" and self._speculates:
            return fallback_reasons.SPECULATIVE
        if mode == "mixed" and self.judges_mixed:
            return None
        return fallback_reasons.COMPUTE_BOUND if wanted == "auto" else None

    def unsupported_reason(self, layer: Any, k_cache: torch.Tensor) -> Reason | None:
        reason = self._kernels.unsupported_reason(layer.qk_head_dim, k_cache)
        if reason is not None:
            return reason
        if self._query_dtype(k_cache.dtype) not in self._kernels.dtypes:
            return fallback_reasons.QUERY_DTYPE
        if self._sealed and self._find(layer_shape(layer, k_cache.dtype), k_cache.dtype) is None:
            return fallback_reasons.LATE_LAYER
        return None

    def _query_dtype(self, kv_dtype: torch.dtype) -> torch.dtype:
        """The query type of layers over this KV type: the model's type over fp8, else the KV type."""
        return self._model_dtype if kv_dtype is FP8 else kv_dtype

    def seal(self) -> None:
        self._sealed = True

    def unsupported_call(self, shape_index: int, q: torch.Tensor) -> Reason | None:
        return None if q.dtype is self._shapes[shape_index].dtype else fallback_reasons.QUERY_DTYPE

    def shape_index(self, layer: Any, k_cache: torch.Tensor) -> int:
        kv_dtype = k_cache.dtype
        shape, dtype = layer_shape(layer, kv_dtype), self._query_dtype(kv_dtype)
        found = self._find(shape, kv_dtype)
        if found is not None:
            return found
        device = k_cache.device
        growth = self._settings.replan_growth
        model = self._kernels.device_model(device, shape, self._settings.max_tile_rows)
        model = dataclasses.replace(model, workers=self._settings.workers or model.workers)
        step, graph_out = self._buffers(shape, model.tile_rows[-1], dtype, kv_dtype, device)
        planner, unshared = Planner(shape, model, max_growth=growth), Planner(shape, model, max_growth=growth)
        no_split = Planner(shape, dataclasses.replace(model, workers=1), max_growth=growth)
        self._shapes.append(_ShapeState(shape, dtype, kv_dtype, step, planner, unshared, no_split, graph_out))
        self.planners.append(planner)
        return len(self._shapes) - 1

    def _find(self, shape: ModelShape, kv_dtype: torch.dtype) -> int | None:
        return next(
            (i for i, state in enumerate(self._shapes) if state.shape == shape and state.kv_dtype is kv_dtype),
            None,
        )

    def _reallocate(self, state: _ShapeState) -> None:
        device = state.graph_out.device
        widest = state.planner.device.tile_rows[-1]
        state.step, state.graph_out = self._buffers(state.shape, widest, state.dtype, state.kv_dtype, device)
        state.loaded = None

    def _buffers(
        self, shape: ModelShape, widest: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
    ) -> tuple[Any, torch.Tensor]:
        limits = self._limits(shape, widest)
        step = self._kernels.make_step(shape, dtype, device, limits, kv_dtype)
        # No plan has the padded rows of a graph's batch, so no kernel writes them. They must be finite nevertheless:
        # a per-tensor quantization in a later layer would spread NaN to all rows. So all layers and graphs share one
        # output that starts with zeros and at worst holds old results. Sharing is safe because the next layer's
        # attention runs after the consumer of this layer's output.
        graph_out = torch.zeros(self._graph_tokens, shape.q_heads * shape.head_dim, dtype=dtype, device=device)
        size = 4 * (limits.kv_slots + limits.partials * shape.q_heads * (shape.head_dim + 1))
        logger.info(
            "prefixpack: %s kernels; buffers for %s: %s, about %.0f MiB",
            self._kernels.name,
            shape,
            limits,
            size / 2**20,
        )
        return step, graph_out

    def _limits(self, shape: ModelShape, widest: int) -> StepLimits:
        """Capacity of the buffers, for tiles of at most `widest` rows."""
        rows, context = self._req_to_token_pool.req_to_token.shape
        steps = LargestSteps(
            rows=rows,
            context=context,
            growth=self._growth,
            drafts=self.drafts,
            graph_batch=self._graph_batch,
            graph_tokens=self._graph_tokens,
            new_tokens=self._prefill_tokens if self._packs_prefill or mixed.was_measured(shape) else 0,
            packs_prefill=self._packs_prefill,
        )
        return step_limits(steps, shape, widest)

    # Every step -----------------------------------------------------------------------------------------------------

    def host_lens(self, forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
        return _matching_host_lens(forward_batch, handed, count)

    def unshared(self, host_lens: Int64Array, query_lens: Int64Array | None = None) -> list[Plan]:
        forest = self._unshared_forest(len(host_lens))
        plans = []
        for state in self._shapes:
            plan = state.unshared.plan(forest, host_lens, query_lens)
            limits = state.step.limits
            most_slots = plan.kv_tokens_packed + len(plan.items) * self._growth
            too_large = (
                len(plan.items) > limits.items
                or plan.num_partials > limits.partials
                # Without drafts each request is read once, for which there is always room.
                or (query_lens is not None and most_slots > limits.kv_slots)
            )
            if too_large or unsupported_combine(plan) is not None:
                plan = state.no_split.plan(forest, host_lens, query_lens)
            plans.append(plan)
        return plans

    def _unshared_forest(self, count: int) -> PrefixForest:
        # One forest per batch size: the planner reuses a plan while it gets the same forest object.
        forest = self._unshared_forests.get(count)
        if forest is None:
            forest = self._unshared_forests[count] = PrefixForest.from_paths([()] * count)
        return forest

    def begin(self, step: PackedStep) -> None:
        seq_lens, visible = step.seq_lens, None
        if step.drafts:
            seq_lens, visible = self._tables_of(seq_lens.device).fill(
                seq_lens, len(step.host_lens), step.drafts, trees=step.trees, mask=step.draft_mask
            )
            step.draft_mask = None
        table = self._req_to_token_pool.req_to_token
        for state, plan in zip(self._shapes, step.plans, strict=True):
            if state.loaded is not plan:
                state.loaded = None  # load may raise
                state.step.load(plan, step.host_lens, self._growth)
                state.loaded = plan
            state.step.prepare(table, step.rows, seq_lens, visible)

    def _tables_of(self, device: torch.device) -> DraftTables:
        if self._draft_tables is None:
            requests = max(self._graph_batch, self._req_to_token_pool.req_to_token.shape[0])
            self._draft_tables = DraftTables(requests, self.drafts, device)
        return self._draft_tables

    def memory_resumed(self) -> None:
        for state in self._shapes:
            state.loaded = None
            state.step.reset()
            state.graph_out.zero_()
            if state.graph_out.is_cuda:
                torch.cuda.synchronize(state.graph_out.device)

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
        state, heads, head_dim = self._shapes[shape_index], layer.tp_q_head_num, layer.qk_head_dim
        q = q.reshape(-1, heads, head_dim)
        tokens = q.shape[0]
        if not self._kernels.takes(q):
            q = q.contiguous()
        if step.in_graph:
            out = state.graph_out[:tokens]
        else:
            out = q.new_empty(tokens, heads * head_dim)
            if tokens > step.num_tokens:
                out[step.num_tokens :].zero_()
        state.step.attend(
            q,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            out.view(tokens, heads, head_dim),
            scale=layer.scaling * scales.k,
            v_scale=scales.v,
            logit_cap=layer.logit_cap,
            window_left=window_left(layer),
            # Converted at each call: weights may be updated while the server runs.
            sinks=None if sinks is None else sinks.float(),
        )
        return out


def _matching_host_lens(forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
    """Host lengths of the first `count` requests without a device access; None if the batch is another one.

    Lengths identify the requests, unless they are bounds. The ForwardBatch is a copy of the batch that was handed over,
    perhaps with padding behind it, and a step must not read device tensors.
    """
    lens = forward_batch.seq_lens_cpu
    if lens is None and handed.bounds:
        lens = handed.seq_lens
    if lens is None or handed.seq_lens is None or lens.shape[0] < count or handed.seq_lens.shape[0] != count:
        return None
    # A copy, because SGLang writes the lengths of the next step to the same memory.
    lens = np.array(lens[:count].numpy(), dtype=np.int64)
    return lens if np.array_equal(lens, handed.seq_lens.numpy()) else None


def _may_gain_in_mixed(facts: ServerFacts, kernels: Kernels) -> bool:
    """Whether a server has mixed steps that packing was measured to speed up: not with masks of images, nor
    with drafts."""
    masked = facts.masks_images
    mixes = facts.mixes_chunks  # else buffers for the longest context would be for nothing
    return kernels.name == "native" and mixes and not masked and not facts.speculates


def _most_prefill_tokens(facts: ServerFacts) -> int:
    """Query tokens of the largest prefill step."""
    chunk = facts.argument("chunked_prefill_size")
    return int(chunk) if chunk and chunk > 0 else int(facts.req_to_token_pool.req_to_token.shape[1])
