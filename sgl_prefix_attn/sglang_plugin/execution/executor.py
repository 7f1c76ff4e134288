"""What runs packed steps: the interface the backend decides over, and its CPU side.

The backend says what runs packed and hands over the plans; an executor owns the planners and all memory that plans
need on its device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import DeviceModel, KvTokens, ModelShape, Plan, Planner, grown_by
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.execution.layer_support import DTYPES, KvScales, layer_shape, window_left
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

# A plan stays right at any lengths: its tails are open-ended. Only its balance drifts as they grow, slowly, so in a
# steady decode the planner is asked every so many steps.
STEPS_WITHOUT_A_LOOK = 8
NO_KV_TOKENS = KvTokens(0, 0, 0)


@dataclass
class PackedStep:
    """A step that runs packed: set up with the metadata, used by every layer. Steady decode steps reuse the object.

    Attributes:
        paths: None for a step of a captured graph whose requests were planned each by itself.
        num_tokens: rows of q.
        rows: int64 rows of req_to_token; in a graph padding may follow the [num_requests] of the batch.
        seq_lens: int64 KV lengths, the step's own tokens included; padded like `rows`.
        host_lens: [num_requests] lengths that the planner last saw; nobody else's memory.
        plans: by slot.
        in_graph: whether a captured graph runs the layers.
        may_be_padded: whether q may have more rows than the step: a prefill graph with attention between its pieces.
        kv_tokens: KV reads of the step that the planner was last asked for.
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
    ) -> PackedStep:
        """The step of a batch as the backend gets it."""
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        return cls(paths, forward_batch.forward_mode, num_tokens, rows, seq_lens, host_lens, plans, in_graph)

    def continues_with(self, forward_batch: Any, handed: Handed, in_graph: bool) -> bool:
        """Takes over a decode batch that has the same paths; False if the planner has to see it.

        Every request must have one token more for each step since the planner saw it: where other backends run some
        steps of the same requests, tails outgrow the room that the plan was loaded with, and nobody else would notice.
        """
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if (
            self.age + 1 >= STEPS_WITHOUT_A_LOOK
            or self.paths is None
            or self.paths.query_lens is not None
            or in_graph is not self.in_graph
            or forward_batch.forward_mode is not self.forward_mode
            or (forward_batch.batch_size != self.paths.num_requests and not in_graph)
            or forward_batch.batch_size < self.paths.num_requests
            or forward_batch.spec_info is not None
            or getattr(forward_batch, "tbo_parent_token_range", None) is not None
            or rows.dtype is not torch.int64
            or seq_lens.dtype is not torch.int64
            or handed.seq_lens is None
            # Native: where the model's own work has emptied the caches, the same by numpy takes 50 to 80 us longer.
            or not grown_by(handed.seq_lens.numpy(), self.host_lens, self.age + 1)
        ):
            return False
        self.rows, self.seq_lens = rows, seq_lens
        self.age += 1
        return True


class Executor(Protocol):
    """One device's way of running packed steps.

    Attributes:
        planners: one for each slot, a slot being an attention shape of the model; the same list for good.
        kernels: what computes, by the name that routing profiles have for it.
        runs_in_graphs: whether captured graphs may hold packed layers.
    """

    planners: list[Planner]
    kernels: str
    runs_in_graphs: bool

    def reserve_graphs(self, max_batch: int) -> None:
        """Told once, before slots are made, that graphs of up to `max_batch` requests will be captured."""

    def packs(self, mode: Mode) -> str | None:
        """Why steps of this kind do not run packed, None if they do."""

    def obstacle(self, layer: Any, k_cache: torch.Tensor) -> str | None:
        """Why a layer that the packed path knows does not run on this device, None if it does."""

    def call_obstacle(self, slot: int, q: torch.Tensor) -> str | None:
        """Why a call of a layer cannot run packed, None if it can."""

    def slot(self, layer: Any, k_cache: torch.Tensor) -> int:
        """Index of the layer's shape, made on first sight."""

    def seal(self) -> None:
        """Told when all layers were shown: from here on a step may be running, so no slot is made for another shape."""

    def host_lens(self, forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
        """A copy of the lengths of the first `count` requests; None if they are not those that were handed over."""

    def unshared(self, host_lens: Int64Array) -> list[Plan]:
        """Plans, by slot, under which every request reads its own KV."""

    def begin(self, step: PackedStep) -> None:
        """Makes a step ready for its layers; PlanTooLarge if its plans do not fit the device's buffers."""

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
        """One layer's output, [num_tokens, q heads * head dim]."""


class CpuExecutor:
    """Runs plans with the CPU kernels; tensors of a step are host memory, so they may be looked at."""

    kernels = "cpu"
    runs_in_graphs = False

    def __init__(self, runner: Any, settings: Settings) -> None:
        self.planners: list[Planner] = []
        self._settings = settings
        self._req_to_token_pool = runner.req_to_token_pool
        self._workspace = PartialWorkspace()

    def reserve_graphs(self, max_batch: int) -> None:
        pass

    def packs(self, mode: Mode) -> str | None:
        return None if getattr(self._settings, f"pack_{mode}") else fallback_reasons.DISABLED

    def obstacle(self, layer: Any, k_cache: torch.Tensor) -> str | None:
        return None

    def call_obstacle(self, slot: int, q: torch.Tensor) -> str | None:
        return None if q.dtype in DTYPES else fallback_reasons.QUERY_DTYPE

    def slot(self, layer: Any, k_cache: torch.Tensor) -> int:
        shape = layer_shape(layer, k_cache.dtype)
        for slot, planner in enumerate(self.planners):
            if planner.shape == shape:
                return slot
        self.planners.append(
            Planner(shape, cpu_device(self._settings), max_growth=self._settings.replan_growth),
        )
        return len(self.planners) - 1

    def seal(self) -> None:
        pass  # host memory can be had at any time

    def host_lens(self, forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
        rows = forward_batch.req_pool_indices
        if rows.shape[0] != count or not torch.equal(rows, handed.rows):
            return None
        return np.array(forward_batch.seq_lens.numpy(), dtype=np.int64)

    def unshared(self, host_lens: Int64Array) -> list[Plan]:
        raise NotImplementedError("CPU steps are never part of a captured graph")

    def begin(self, step: PackedStep) -> None:
        step.rows, step.seq_lens = _as_int64(step.rows), _as_int64(step.seq_lens)

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
        while slot >= len(step.plans):  # the layer was not among those that the model showed beforehand
            paths = step.paths
            assert paths is not None
            step.plans.append(self.planners[len(step.plans)].plan(paths.forest, step.host_lens, paths.query_lens))
        out = packed_attention(
            q.reshape(step.num_tokens, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            step.plans[slot],
            req_to_token=self._req_to_token_pool.req_to_token,
            req_pool_indices=step.rows,
            seq_lens=step.seq_lens,
            scale=layer.scaling,
            k_scale=scales.k,
            v_scale=scales.v,
            logit_cap=layer.logit_cap,
            window_left=window_left(layer),
            sinks=None if sinks is None else sinks.float(),
            workspace=self._workspace,
            threads=self._settings.cpu_threads,
        )
        return out.view(step.num_tokens, -1)


def lens_of_batch(forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
    """Host lengths of the first `count` requests without touching the device; None if the batch is another one.

    Requests are recognised by their lengths: the batch that the backend gets is a copy of the one handed over, perhaps
    with padding behind it, and device tensors must not be looked at in a step.
    """
    lens = forward_batch.seq_lens_cpu
    if lens is None or handed.seq_lens is None or lens.shape[0] < count or handed.seq_lens.shape[0] != count:
        return None
    # A copy: SGLang writes the next step's lengths to the same memory.
    lens = np.array(lens[:count].numpy(), dtype=np.int64)
    return lens if np.array_equal(lens, handed.seq_lens.numpy()) else None


def cpu_device(settings: Settings) -> DeviceModel:
    """The planner's view of the CPU under these settings."""
    threads = settings.cpu_threads or torch.get_num_threads()
    device = DeviceModel.cpu(threads)
    return dataclasses.replace(
        device,
        workers=settings.workers or device.workers,
        tile_rows=tuple(rows for rows in device.tile_rows if rows <= settings.max_tile_rows),
    )


def gpu_device(
    settings: Settings, sm_count: int, shape: ModelShape, *, max_tile_rows: int, warpgroup_products: bool
) -> DeviceModel:
    """The planner's view of a GPU whose kernels have row tiles up to `max_tile_rows`."""
    device = DeviceModel.gpu(
        sm_count,
        head_dim=shape.head_dim,
        group=shape.group,
        max_tile_rows=min(settings.max_tile_rows, max_tile_rows),
        warpgroup_products=warpgroup_products,
    )
    return dataclasses.replace(device, workers=settings.workers or device.workers)


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64).contiguous()
