"""The CUDA side of packed steps: device buffers for each attention shape, and decode inside captured graphs.

A captured graph holds the launches of the layers and the addresses of the buffers, no plan. What differs from step to
step is brought into the buffers before the replay: the plan if it is a new one, and by one small kernel the step's KV
slots and lengths. All of that runs on the current stream, which is SGLang's forward stream.

Overlap scheduling: while a step runs, the scheduler changes `req_to_token` for the next one on its own stream, as soon
as this step has read what it needs. Ours reads the scheduler's tables in that one kernel alone, before the replay; the
layers read the copies. SGLang 0.5.14 to 0.5.17 records its "reads are done" event between the two; later versions ask
`shared_read_ends`, which says so.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import torch

from sgl_prefix_attn.core.cuda_step import unmergeable
from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import ModelShape, Plan, Planner
from sgl_prefix_attn.core.step_buffers import StepLimits
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.execution.executor import STEPS_WITHOUT_A_LOOK, PackedStep, gpu_device, lens_of_batch
from sgl_prefix_attn.sglang_plugin.execution.kernel_set import Kernels
from sgl_prefix_attn.sglang_plugin.execution.layer_support import FP8, KvScales, layer_shape, window_left
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

logger = logging.getLogger(__name__)

# Without graphs nothing says how large decode batches get; larger ones run on the stock backend.
BATCH_WITHOUT_GRAPHS = 512


@dataclass
class _Slot:
    """An attention shape: its planners and its device memory.

    Attributes:
        dtype, kv_dtype: of queries and output, and of KV.
        step: the device buffers, a `GpuStep` or what stands in for it.
        planner: of batches with known sharing.
        alone: of batches whose requests are read one by one.
        uncut: as `alone`, but never splits a request: needs the least buffers.
        loaded: the plan that is on the device; kept, so that its identity means something.
        graph_out: [largest graph batch, q heads * head dim] output of the layers of captured graphs.
    """

    shape: ModelShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    step: Any
    planner: Planner
    alone: Planner
    uncut: Planner
    graph_out: torch.Tensor
    loaded: Plan | None = None


class CudaExecutor:
    """Runs plans on one CUDA device.

    Args:
        runner: SGLang's ModelRunner.
        settings: settings in force.
        kernels: what computes.
    """

    runs_in_graphs = True

    def __init__(self, runner: Any, settings: Settings, kernels: Kernels) -> None:
        self.planners: list[Planner] = []
        self.kernels = kernels.name
        self._settings = settings
        self._kernels = kernels
        self._model_dtype = runner.dtype
        self._req_to_token_pool = runner.req_to_token_pool
        self._prefill_tokens = _prefill_tokens(runner, settings)
        # Between two looks of the planner, which replans at `replan_growth`, tails grow on.
        self._growth = settings.replan_growth + STEPS_WITHOUT_A_LOOK
        self._graph_batch = 0
        self._slots: list[_Slot] = []
        self._sealed = False
        self._unshared_forests: dict[int, PrefixForest] = {}

    # Before the first step ------------------------------------------------------------------------------------------

    def reserve_graphs(self, max_batch: int) -> None:
        if max_batch <= self._graph_batch:
            return
        self._graph_batch = max_batch
        # SGLang captures all its graphs after this, so buffers made before belong to none.
        for slot in self._slots:
            self._fill(slot)

    def packs(self, mode: Mode) -> str | None:
        wanted = getattr(self._settings, f"pack_{mode}")
        if wanted == "auto":
            return fallback_reasons.COMPUTE_BOUND
        return None if wanted else fallback_reasons.DISABLED

    def obstacle(self, layer: Any, k_cache: torch.Tensor) -> str | None:
        problem = self._kernels.obstacle(layer.qk_head_dim, k_cache)
        if problem is not None:
            return problem
        if self._query_dtype(k_cache.dtype) not in self._kernels.dtypes:
            return fallback_reasons.QUERY_DTYPE
        if self._sealed and self._find(layer_shape(layer, k_cache.dtype), k_cache.dtype) is None:
            return fallback_reasons.LATE_LAYER
        return None

    def _query_dtype(self, kv_dtype: torch.dtype) -> torch.dtype:
        """Of the layers that read such KV: queries stay in the model's type where KV is stored in eight bits."""
        return self._model_dtype if kv_dtype is FP8 else kv_dtype

    def seal(self) -> None:
        self._sealed = True

    def call_obstacle(self, slot: int, q: torch.Tensor) -> str | None:
        return None if q.dtype is self._slots[slot].dtype else fallback_reasons.QUERY_DTYPE

    def slot(self, layer: Any, k_cache: torch.Tensor) -> int:
        kv_dtype = k_cache.dtype
        shape, dtype = layer_shape(layer, kv_dtype), self._query_dtype(kv_dtype)
        found = self._find(shape, kv_dtype)
        if found is not None:
            return found
        device = k_cache.device
        step, graph_out = self._buffers(shape, dtype, kv_dtype, device)
        growth = self._settings.replan_growth
        model = gpu_device(
            self._settings, _sm_count(device), shape, max_tile_rows=self._kernels.max_tile_rows,
            warpgroup_products=self._kernels.warpgroup_products(device, kv_dtype),
        )  # fmt: skip
        uncut_model = dataclasses.replace(model, workers=1)
        planner = Planner(shape, model, max_growth=growth)
        alone, uncut = Planner(shape, model, max_growth=growth), Planner(shape, uncut_model, max_growth=growth)
        self._slots.append(_Slot(shape, dtype, kv_dtype, step, planner, alone, uncut, graph_out))
        self.planners.append(planner)
        return len(self._slots) - 1

    def _find(self, shape: ModelShape, kv_dtype: torch.dtype) -> int | None:
        return next(
            (i for i, slot in enumerate(self._slots) if slot.shape == shape and slot.kv_dtype is kv_dtype),
            None,
        )

    def _fill(self, slot: _Slot) -> None:
        device = slot.graph_out.device
        slot.step, slot.graph_out = self._buffers(slot.shape, slot.dtype, slot.kv_dtype, device)
        slot.loaded = None

    def _buffers(
        self, shape: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
    ) -> tuple[Any, torch.Tensor]:
        limits = self._limits()
        step = self._kernels.make_step(shape, dtype, device, limits, kv_dtype)
        # Padded rows of a graph's batch are in no plan, so nothing writes them and nothing reads KV for them; what
        # the model's other layers make of them is thrown away. But they must be finite numbers, or a per-tensor
        # quantization would spread their NaN. Hence one output for all layers and graphs that starts with zeros and
        # holds old results at worst, not new memory each time. The next layer's attention comes after whoever
        # consumes this one's.
        graph_out = torch.zeros(self._graph_batch, shape.q_heads * shape.head_dim, dtype=dtype, device=device)
        size = 4 * (limits.kv_slots + limits.partial_slots * shape.q_heads * (shape.head_dim + 1))
        logger.info(
            "prefixpack: %s kernels; buffers for %s: %s, about %.0f MiB",
            self._kernels.name,
            shape,
            limits,
            size / 2**20,
        )
        return step, graph_out

    def _limits(self) -> StepLimits:
        """What the buffers hold.

        In a graph there is nobody to fall back to, so `uncut` plans of the largest graph always fit: one item a
        request, no partial results, and at most its whole context as KV slots (what FlashInfer reserves, too).
        """
        rows, context = self._req_to_token_pool.req_to_token.shape
        batch = self._graph_batch or min(rows, BATCH_WITHOUT_GRAPHS)
        queries = max(batch, rows) + self._prefill_tokens
        return StepLimits(
            queries=queries,
            items=4 * queries + 8192,
            kv_slots=batch * (context + self._growth),
            # A query has one for each pack it is in and for each split of those; trees are seldom deep, and what
            # needs many splits is a small batch.
            partial_slots=6 * batch + 4096 + 2 * self._prefill_tokens,
        )

    # Every step -----------------------------------------------------------------------------------------------------

    def host_lens(self, forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
        return lens_of_batch(forward_batch, handed, count)

    def unshared(self, host_lens: Int64Array) -> list[Plan]:
        forest = self._unshared_forest(len(host_lens))
        plans = []
        for slot in self._slots:
            plan = slot.alone.plan(forest, host_lens)
            limits = slot.step.limits
            too_large = len(plan.items) > limits.items or plan.num_slots > limits.partial_slots
            if too_large or unmergeable(plan) is not None:
                plan = slot.uncut.plan(forest, host_lens)
            plans.append(plan)
        return plans

    def _unshared_forest(self, count: int) -> PrefixForest:
        # Kept by size: the planner reuses a plan while it gets the same forest.
        forest = self._unshared_forests.get(count)
        if forest is None:
            forest = self._unshared_forests[count] = PrefixForest.from_paths([()] * count)
        return forest

    def begin(self, step: PackedStep) -> None:
        rows, seq_lens = _as_int64(step.rows), _as_int64(step.seq_lens)
        table = self._req_to_token_pool.req_to_token
        for slot, plan in zip(self._slots, step.plans, strict=True):
            if slot.loaded is not plan:
                slot.loaded = None
                slot.step.load(plan, step.host_lens, self._growth)
                slot.loaded = plan
            slot.step.prepare(table, rows, seq_lens)

    def attend(
        self,
        step: PackedStep,
        slot: int,
        q: torch.Tensor,
        layer: Any,
        pool: Any,
        sinks: torch.Tensor | None,
        scales: KvScales,
    ) -> torch.Tensor:
        state, heads, head_dim = self._slots[slot], layer.tp_q_head_num, layer.qk_head_dim
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
            # No copy is kept of what is not float32: weights may be updated while the server runs.
            sinks=None if sinks is None else sinks.float(),
        )
        return out


def _sm_count(device: torch.device) -> int:
    """Of the device; of an H200 where interpreted kernels stand in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _prefill_tokens(runner: Any, settings: Settings) -> int:
    """Query tokens of a prefill step, if prefill steps are to run packed."""
    if settings.pack_extend is not True and settings.pack_mixed is not True:
        return 0
    chunk = runner.server_args.chunked_prefill_size
    return int(chunk) if chunk and chunk > 0 else int(runner.req_to_token_pool.req_to_token.shape[1])


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.int64 and tensor.is_contiguous() else tensor.to(torch.int64).contiguous()
