"""How a plan's work queue spreads over the workers, and the time of a step, by the planner's cost model.

The queue is simulated: every worker takes the next entry when it is free. An entry is a work item for one KV head,
a worker has its share of the device's bandwidth and arithmetic. Nothing here is measured.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import (
    KV_BEGIN,
    KV_END,
    PARTIAL_BEGIN,
    QUERY_COUNT,
    REQUEST,
    TILE_ROWS,
    WRITE_THROUGH,
    DeviceModel,
    ModelShape,
    Plan,
)
from sgl_prefix_attn.explain.packs import item_ends


@dataclass(frozen=True)
class Schedule:
    """Simulated queue. worker_seconds: float64 [workers], busy time of each. combine_seconds: of the last combine."""

    worker_seconds: npt.NDArray[np.float64]
    combine_seconds: float

    @property
    def max_over_mean(self) -> float:
        """Longest busy time / mean busy time. 1 is perfect balance; idle workers count."""
        return float(self.worker_seconds.max() / self.worker_seconds.mean())

    @property
    def seconds(self) -> float:
        """Estimated time of one layer's attention."""
        return float(self.worker_seconds.max()) + self.combine_seconds


def simulate(plan: Plan, seq_lens: Int64Array, shape: ModelShape, device: DeviceModel) -> Schedule:
    """Greedy run of the queue in the plan's order, KV heads of an item next to each other."""
    free = [(0.0, worker) for worker in range(device.workers)]
    for seconds in item_seconds(plan, seq_lens, shape, device).tolist():
        for _ in range(shape.kv_heads):
            busy, worker = free[0]
            heapq.heapreplace(free, (busy + seconds, worker))
    loads = np.zeros(device.workers)
    for busy, worker in free:
        loads[worker] = busy
    combined = int(plan.combine_offset[-1]) if len(plan.combine_offset) else 0
    return Schedule(loads, partial_bytes(combined, shape) / 2 / device.bandwidth)


def item_seconds(plan: Plan, seq_lens: Int64Array, shape: ModelShape, device: DeviceModel) -> npt.NDArray[np.float64]:
    """Seconds one worker needs for each item and one KV head, float64 [items]: overhead, the longer of reading KV and
    computing the (padded) tile and as much of the other as `device.overlap` leaves, and writing partials. KV that a
    sibling row tile has just read costs `device.reread`; what another work tile of a narrow item has, `narrow_reread`.
    """
    items = plan.items
    tokens = item_ends(plan, seq_lens) - items[:, KV_BEGIN]
    bandwidth, rows = device.bandwidth / device.workers, items[:, TILE_ROWS]
    wide = (rows >= device.wide_rows) & (device.wide_rows > 0)
    flops = np.where(wide, device.wide_flops, device.flops) / device.workers
    read = tokens * (2 * shape.head_dim * shape.kv_bytes / bandwidth)
    follows_sibling = np.zeros(len(items), bool)
    kv_range = items[:, [REQUEST, KV_BEGIN, KV_END]]
    follows_sibling[1:] = (kv_range[1:] == kv_range[:-1]).all(axis=1)
    narrow = rows <= device.narrow_rows
    again = read * np.where(narrow, device.narrow_reread * (device.narrow_parts - 1), 0.0)
    read = np.where(follows_sibling, read * device.reread, read) + again
    compute = tokens * rows * (4 * shape.head_dim / flops)
    partials = np.where(items[:, PARTIAL_BEGIN] == WRITE_THROUGH, 0, items[:, QUERY_COUNT])
    write = partials * (partial_bytes(1, shape) / 2 / shape.kv_heads / bandwidth)
    both = np.maximum(read, compute) + (1 - device.overlap) * np.minimum(read, compute)
    overhead = np.where(narrow, device.narrow_overhead, device.item_overhead)
    return overhead + both + write


def partial_bytes(slots: int, shape: ModelShape) -> int:
    """Bytes a layer moves to write and read back `slots` partials: per query head an output and an fp32 lse."""
    return 2 * slots * shape.q_heads * (shape.head_dim * shape.partial_bytes + 4)
