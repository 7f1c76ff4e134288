"""Forest -> plan: packs, row tiles, KV splits, queue order and partials, made by native code."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import NamedTuple

from sgl_prefix_attn import _native
from sgl_prefix_attn._native import Plan as Plan
from sgl_prefix_attn._native import grown_by as grown_by
from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.gpus import PlannerFigures, known_gpu

# WorkItem of csrc/plan/plan.h: the columns of Plan.items.
QUERY_BEGIN, QUERY_COUNT, REQUEST, KV_BEGIN, KV_END, PARTIAL_BEGIN, TILE_ROWS = range(7)
OPEN_END = -1
WRITE_THROUGH = -1

DEFAULT_MAX_GROWTH = 64
# What native code takes. It names the narrower range of each figure itself.
_KINDS = {int: "an integer from -2^31 to 2^31 - 1", float: "a number", list: "integers from -2^31 to 2^31 - 1"}


class PlanError(ValueError):
    """The native planner made no plan: lengths that do not fit the forest, or memory or numbers that do not suffice."""


@dataclass(frozen=True)
class ModelShape:
    """Attention shape of one tensor-parallel rank.

    Attributes:
        q_heads: query heads, a multiple of kv_heads.
        kv_heads: KV heads.
        head_dim: elements of a head.
        kv_bytes: bytes of one stored K or V element.
        partial_bytes: bytes of one element of a partial output.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: int = 2
    partial_bytes: int = 4

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads


class GpuRates(NamedTuple):
    """What a GPU does in a second, beside the GPU that the planner's figures were fitted on.

    Attributes:
        figures: the fitted ones.
        bandwidth: bytes that all SMs read.
        clocks: of all SMs, added up, over those of the fitted GPU.
        bandwidth_per_sm: of an SM's share of the bandwidth, over that of the fitted GPU.
        most_flops: floating-point operations that no tile exceeds.
    """

    figures: PlannerFigures
    bandwidth: float
    clocks: float = 1.0
    bandwidth_per_sm: float = 1.0
    most_flops: float = math.inf

    @classmethod
    def fitted(cls, figures: PlannerFigures) -> GpuRates:
        """The rates of the GPU that the figures were fitted on."""
        return cls(figures, figures.bandwidth)


_H200_FIGURES = known_gpu("h200").planner
assert _H200_FIGURES is not None
H200_RATES = GpuRates.fitted(_H200_FIGURES)


_DEFAULTS = _native.DeviceModel()  # of the figures that a device need not have: csrc/plan/cost_model.h has them


@dataclass(frozen=True)
class DeviceModel:
    """Figures of a device from which the planner computes costs.

    Attributes:
        workers: work items in flight: CTAs on a GPU, threads on a CPU.
        bandwidth: bytes per second that all workers read together.
        flops: floating-point operations per second of all workers at full tiles.
        item_overhead: seconds of a worker per item, apart from its KV.
        reread: cost, 0 to 1, of reading KV that a sibling tile has just read, against a first read.
        tile_rows: row counts of the kernel's tiles, ascending.
        narrow_rows: most rows of a narrow item, which takes only a part of a worker (on a GPU: one warp of a CTA).
        narrow_per_worker: narrow items that a worker runs at a time.
        narrow_to_fill: narrow items that use all of a worker's bandwidth.
        narrow_overhead: seconds of a worker per narrow item, apart from its KV.
        narrow_parts: parts of a narrow item, each of which reads its KV. Where that costs more than a whole worker's
            overhead, the query gets a tile of a whole worker.
        narrow_reread: cost, 0 to 1, of reading the KV by each part but the first.
        lone_speedup: how much faster a worker computes while most others have nothing to do.
        combine_step: seconds of a combine per `combine_width` partials of `combine_rows` rows. One worker adds a row's
            partials one step after the other. Narrow items have an eighth of the rows and half of the width.
        combine_latency: seconds of a combine before its first step.
        combine_fan_in: most partials of a row that are combined in one level.
        overlap: 1 where a worker computes while it waits for KV, 0 where it does one after the other, or in between.
        wide_rows: fewest rows of a wide tile, which computes at `wide_flops`; 0 for none.
        wide_flops: floating-point operations per second of all workers at wide tiles.
        widest_flops: at the widest tiles in decode and verify steps; 0: these have the costs of mixed steps.
        medium_flops: likewise, at other wide tiles.
        deferred_combine: seconds of a combine of four steps or more, in decode and verify steps.
        deferred_combine_step: and per eight of its partials.
    """

    workers: int
    bandwidth: float
    flops: float
    item_overhead: float
    reread: float
    tile_rows: tuple[int, ...]
    narrow_rows: int = _DEFAULTS.narrow_rows
    narrow_per_worker: int = _DEFAULTS.narrow_per_worker
    narrow_to_fill: int = _DEFAULTS.narrow_to_fill
    narrow_overhead: float = _DEFAULTS.narrow_overhead
    narrow_parts: int = _DEFAULTS.narrow_parts
    narrow_reread: float = _DEFAULTS.narrow_reread
    overlap: float = _DEFAULTS.overlap
    wide_rows: int = _DEFAULTS.wide_rows
    wide_flops: float = _DEFAULTS.wide_flops
    lone_speedup: float = _DEFAULTS.lone_speedup
    combine_step: float = _DEFAULTS.combine_step
    combine_rows: int = _DEFAULTS.combine_rows
    combine_width: int = _DEFAULTS.combine_width
    combine_latency: float = _DEFAULTS.combine_latency
    combine_fan_in: int = _DEFAULTS.combine_fan_in
    widest_flops: float = _DEFAULTS.widest_flops
    medium_flops: float = _DEFAULTS.medium_flops
    deferred_combine: float = _DEFAULTS.deferred_combine
    deferred_combine_step: float = _DEFAULTS.deferred_combine_step

    def native(self) -> _native.DeviceModel:
        """The same figures for the native planner. By name: two figures in a wrong order would go unnoticed."""
        model = _native.DeviceModel()
        for name, value in asdict(self).items():
            try:
                setattr(model, name, value)
            except TypeError:
                kind = _KINDS[type(getattr(model, name))]
                raise ValueError(f"{name} is {value!r}; expected {kind}") from None
        return model

    @classmethod
    def cpu(cls, threads: int | None = None) -> DeviceModel:
        """A CPU with `threads` workers (default: all cores this process may use); figures of an EPYC core of 2023."""
        workers = threads if threads is not None else len(os.sched_getaffinity(0))
        return cls(
            workers=workers,
            bandwidth=14e9 * workers,
            flops=92e9 * workers,
            item_overhead=2e-6,
            reread=0.25,
            tile_rows=(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128),
            overlap=0.0,
        )

    @classmethod
    def gpu(
        cls,
        sm_count: int,
        *,
        head_dim: int = 128,
        group: int = 1,
        rates: GpuRates = H200_RATES,
        max_tile_rows: int = 128,
        kv_bytes: int = 2,
        warpgroup_products: bool = True,
        ctas_per_sm: int = 2,
        cta_warps: int = 8,
    ) -> DeviceModel:
        """A GPU; the default figures are those of an H200. `core.gpu.planner_model` fills them in for another.

        Products scale with the clocks of the SMs. Overheads and latencies are an H200's on every GPU.

        Args:
            sm_count: SMs.
            head_dim: elements of a head. Above 128 there are no tiles of 128 rows, and no items of one warp.
            group: query heads of a KV head. A warp takes half of a larger group (csrc/cuda/common/index_math.h).
            rates: of the GPU.
            max_tile_rows: rows of the widest tile.
            kv_bytes: bytes of one stored K or V element.
            warpgroup_products: whether the widest tile uses WGMMA: native kernels and compute capability 9.0.
            ctas_per_sm: CTAs that run on an SM at a time. A lone one has all of its bandwidth to fill.
            cta_warps: items of one warp that run on a CTA's share of an SM at a time.
        """
        wide = head_dim > 128
        max_tile_rows = min(max_tile_rows, 64 if wide else 128)
        halves = 1 if wide else _native.head_halves(group)
        narrow_rows = 0 if wide else 8 * halves
        kernels = rates.figures.kernels[64 if head_dim <= 64 else 256 if wide else 128, 1 if kv_bytes == 1 else 2]
        costs = dict(rates.figures.costs)
        warps_to_fill = max(1, round(kernels.warps_to_fill * rates.bandwidth_per_sm * 2 / ctas_per_sm))
        wide_flops = kernels.wide_flops if warpgroup_products else kernels.wide_mma_flops
        of_verify = rates.clocks if warpgroup_products and max_tile_rows == 128 else 0.0
        return cls(
            workers=ctas_per_sm * sm_count,
            bandwidth=rates.bandwidth,
            flops=min(kernels.flops * rates.clocks, rates.most_flops),
            tile_rows=tuple(rows for rows in (narrow_rows, 32, 64, 128) if 0 < rows <= max_tile_rows),
            narrow_rows=narrow_rows,
            narrow_per_worker=1 if wide else cta_warps // halves,
            narrow_to_fill=1 if wide else min(warps_to_fill, cta_warps // halves),
            narrow_overhead=costs.pop("narrow_overhead") * halves,
            narrow_parts=halves,
            wide_rows=64,
            wide_flops=min(wide_flops * rates.clocks, rates.most_flops),
            combine_rows=_native.combine_rows,
            combine_width=_native.combine_width,
            combine_fan_in=_native.combine_fan_in,
            widest_flops=min(of_verify * kernels.widest_flops, rates.most_flops),
            medium_flops=min(of_verify * kernels.medium_flops, rates.most_flops),
            **costs,
        )


class KvTokens(NamedTuple):
    """KV positions per layer and KV head: read by the plan, by request-wise attention, and each once."""

    packed: int
    per_request: int
    unique: int


class Planner:
    """Makes plans and reuses them over decode steps, also of a few batches in turn.

    Args:
        shape: attention shape.
        device: what runs the plan.
        max_growth: most tokens by which tails may grow before a new plan is made; balance may end it earlier.

    Raises:
        ValueError: shape or device figures out of range.
    """

    def __init__(self, shape: ModelShape, device: DeviceModel, *, max_growth: int = DEFAULT_MAX_GROWTH) -> None:
        self.shape = shape
        self.device = device
        for name, value in {**asdict(shape), "max_growth": max_growth}.items():
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"{name} is {value}; expected {_KINDS[int]}")
        self._native = _native.Planner(_native.ModelShape(**asdict(shape)), device.native(), max_growth)

    def plan(self, forest: PrefixForest, seq_lens: Int64Array, query_lens: Int64Array | None = None) -> Plan:
        """The plan of a step.

        Args:
            forest: the batch's forest. Its last plan is reused for the same object.
            seq_lens: [num_requests] int64 KV lengths by batch index, the step's own tokens included.
            query_lens: [num_requests] int64 new tokens of each request; None: one each (decode).

        Raises:
            PlanError: whatever the native planner raises; for lengths that do not fit the forest it names the request.
        """
        try:
            return self._native.plan(forest.native, seq_lens, query_lens)
        except ValueError as error:
            raise PlanError(str(error)) from error
        except Exception as error:  # bad_alloc, overflow: the caller needs one type to fall back on
            raise PlanError(f"{type(error).__name__}: {error}") from error

    @property
    def plans_made(self) -> int:
        return self._native.plans_made

    @property
    def plans_reused(self) -> int:
        return self._native.plans_reused

    @property
    def plan_seconds(self) -> float:
        """Seconds spent on making plans since construction."""
        return self._native.plan_seconds

    @property
    def kv_tokens(self) -> KvTokens:
        """KV positions that the batch last planned or reused reads at its current lengths."""
        return KvTokens(*self._native.kv_tokens)
