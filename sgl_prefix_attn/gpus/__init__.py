"""GPUs, a TOML file each: who they are, their data sheet, and what was fitted or measured on them.

The file's name is the GPU's name in commands. A comment in the file says where each figure is from.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


class KernelFigures(NamedTuple):
    """The planner's figures of the kernels of a head size and KV type, in floating-point operations per second.

    Attributes:
        flops: of tiles of up to 32 rows, all CTAs together.
        wide_flops: of tiles of more rows, with WGMMA.
        wide_mma_flops: of tiles of more rows, with mma.sync.
        warps_to_fill: warps that use all of a CTA's share of the bandwidth.
        widest_flops: of tiles of 128 rows, with WGMMA, in decode and verify steps; 0: not fitted.
        medium_flops: likewise, of tiles of 64 rows.
    """

    flops: float
    wide_flops: float
    wide_mma_flops: float
    warps_to_fill: int
    widest_flops: float = 0.0
    medium_flops: float = 0.0


@dataclass(frozen=True)
class PlannerFigures:
    """What the planner takes for a GPU's costs.

    Attributes:
        bandwidth: bytes per second that kernels read.
        costs: fields of `DeviceModel` that do not depend on the kernels.
        kernels: by head_dim and bytes of a KV element.
    """

    bandwidth: float
    costs: Mapping[str, float]
    kernels: Mapping[tuple[int, int], KernelFigures]

    @classmethod
    def of(cls, table: dict[str, Any]) -> PlannerFigures:
        """The figures from a file's table `planner`."""
        rows = [dict(row) for row in table["kernels"]]
        kernels = {(row.pop("head_dim"), row.pop("kv_bytes")): KernelFigures(**row) for row in rows}
        return cls(table["bandwidth"], table["costs"], kernels)


@dataclass(frozen=True)
class KnownGpu:
    """A GPU that has a file.

    Attributes:
        name: CUDA's.
        capability: compute capability.
        sm_count: SMs.
        memory_mib: all memory, as nvidia-smi tells it.
        shared_memory_kib: shared memory that a CTA can have.
        clock: most Hz of an SM; 0: not known, as for `bandwidth`.
        bandwidth: bytes per second of the memory.
        tensor_flops: floating-point operations of an SM in a clock: 16-bit products, sums in fp32. A file with this
            figure speaks for its compute capability: GPUs whose driver does not tell clocks get those of this one.
        verify_steps: whether the rule of verify steps was measured on the GPU.
        planner: fitted figures; None: the planner scales those of another GPU.
        simulator: fields of `benchmarks.simulator.Machine`; those that are absent are another GPU's.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_mib: int
    shared_memory_kib: int
    clock: float = 0.0
    bandwidth: float = 0.0
    tensor_flops: int = 0
    verify_steps: bool = False
    planner: PlannerFigures | None = None
    simulator: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shared_memory_per_block(self) -> int:
        """Shared memory in bytes that a CTA can have."""
        return self.shared_memory_kib << 10


@functools.cache
def known_gpu(name: str) -> KnownGpu:
    """The GPU of a file, by the file's name without `.toml`."""
    table = tomllib.loads(resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    table["capability"] = tuple(table["capability"])
    if "planner" in table:
        table["planner"] = PlannerFigures.of(table["planner"])
    return KnownGpu(**table)


@functools.cache
def known_gpus() -> Mapping[str, KnownGpu]:
    """All GPUs that have a file, by the file's name."""
    files = sorted(file.name for file in resources.files(__package__).iterdir() if file.name.endswith(".toml"))
    return {name: known_gpu(name) for name in (file.removesuffix(".toml") for file in files)}
