"""When the GPU kernels would be done with a plan: a simulation on the CPU, compiled at first use.

Workers share the bandwidth and each has a rate of its own. Work tiles take time to begin and to end, and the last
partial of a query waits for its combine. A GPU's file (`sgl_prefix_attn/gpus/`) has the figures, and says what they are
fitted to.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.native_build import ROOT, built_module
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.gpu import H200
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan
from sgl_prefix_attn.gpus import known_gpus

SIMULATED_GPUS = {known.name: known for known in known_gpus().values() if known.simulator}
WARP_ROWS = 8
WIDEST_HEAD_OF_WARPS = 128


@dataclass(frozen=True)
class Makespan:
    """Seconds of one layer.

    Attributes:
        seconds: to the end of the last work tile.
        streaming: bytes of all work tiles over the bandwidth.
        longest: of one work tile by itself.
        work: of the workers, if the bandwidth had no end and no worker were ever idle.
    """

    seconds: float
    streaming: float
    longest: float
    work: float

    @property
    def lower_bound(self) -> float:
        """No order of the work tiles is done sooner."""
        return max(self.streaming, self.longest, self.work)


def figures_of(name: str, shape: ModelShape) -> dict[str, Any]:
    """The figures of a GPU, by CUDA's name, and of the kernels of a shape.

    Where the GPU's file has none: an H200's. Where that has none of the shape: those of head_dim 128 and 16 bits.
    """
    own = SIMULATED_GPUS[name].simulator if name in SIMULATED_GPUS else {}
    figures = {**SIMULATED_GPUS[H200.name].simulator, **own}
    return figures | figures.pop("kernels").get(f"{shape.head_dim},{shape.kv_bytes}", {})


def makespan(
    plan: Plan, seq_lens: Int64Array, shape: ModelShape, device: DeviceModel, figures: Mapping[str, Any] | None = None
) -> Makespan:
    """Simulates the kernels.

    Args:
        plan: for the device.
        seq_lens: [num_requests] int64 KV lengths by batch index.
        device: gives the workers and the work tiles of narrow items; two workers to an SM.
        figures: of the machine, which have to be positive; None: those of an H200 and the shape.

    Raises:
        ValueError: lengths that do not fit the plan, or too many work tiles.
    """
    machine = {
        **(figures_of(H200.name, shape) if figures is None else figures),
        "resident_ctas": device.workers,
        "few_ctas": max(1, device.workers // 2),
        "narrow_parts": device.narrow_parts,
        "narrow_rows": WARP_ROWS * device.narrow_parts if shape.head_dim <= WIDEST_HEAD_OF_WARPS else 0,
    }
    return Makespan(*_native().simulate(plan, seq_lens, shape, machine))


@functools.cache
def _native() -> ModuleType:
    own = [Path(__file__).with_name(name) for name in ("bindings.cpp", "makespan.cpp", "makespan.h")]
    plan = [ROOT / "csrc" / "plan" / name for name in ("checks.cpp", "deferral.cpp")]
    return built_module("makespan", [*own[:2], *plan], options=["-O2"], depends=own)
