"""When the GPU kernels would be done with a plan: a simulation on the CPU.

Workers share the bandwidth and each has a rate of its own. Work tiles take time to begin and to end, and the last
partial of a query waits for its combine. Figures are fitted to times of drawn batches on H100s. An H200 has the same
SMs and clock, and its bandwidth is scaled by those that copies reach. docs/design-notes/simulator.md has the errors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import gpu
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan

# Bytes per second. 0.98 of what copies reach: 3.01e12 and 4.28e12.
BANDWIDTHS = {gpu.H100.name: 2.94e12, gpu.H200.name: 4.2e12}
SIMULATED_GPUS = {known.name: known for known in (gpu.H100, gpu.H200)}
# Of KV in 16 bits and head_dim 128. Fitted to drawn batches of dev seeds.
H200: dict[str, float] = {
    "bandwidth": BANDWIDTHS[gpu.H200.name],
    "begin": 6.8e-06,
    "warp_begin": 2.06e-06,
    "cta_start": 9e-07,
    "cta_end": 1.48e-06,
    "cta_store": 4.23e11,
    "warp_start": 2.65e-06,
    "warp_rate": 9e09,
    "flops32": 3.43e14,
    "flops64": 5.07e14,
    "flops128": 5.48e14,
    "key_tile": 64,
    "lone_speedup": 1.49,
    "sibling": 0.407,
    "cta_combine": 3.02e-06,
    "warp_combine": 6.25e-07,
    "cta_combine_step": 6.43e-07,
    "warp_combine_step": 1.16e-06,
    "deferred_combine": 2.3e-06,
    "deferred_combine_step": 4.33e-07,
}
# What differs for other kernels, by head_dim and bytes of a KV element.
KERNELS: dict[tuple[int, int], dict[str, float]] = {
    (128, 2): {},
    (128, 1): {"flops32": 1.76e14, "flops64": 2.88e14, "flops128": 4.44e14, "warp_rate": 5.4e09},
    (64, 2): {"flops64": 3.61e14, "flops128": 3.93e14, "lone_speedup": 1.0, "warp_rate": 6e09},
    (256, 2): {"flops32": 2.06e14, "flops64": 3.79e14, "key_tile": 32, "lone_speedup": 1.0, "sibling": 0.102},
}
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


def figures_of(name: str, shape: ModelShape) -> dict[str, float]:
    """Of a GPU, by CUDA's name, and the kernels of a shape.

    Where there are none: an H200's bandwidth, and the kernels of head_dim 128 and 16 bits.
    """
    bandwidth = {"bandwidth": BANDWIDTHS.get(name, BANDWIDTHS[gpu.H200.name])}
    return H200 | KERNELS.get((shape.head_dim, shape.kv_bytes), {}) | bandwidth


def makespan(
    plan: Plan, seq_lens: Int64Array, shape: ModelShape, device: DeviceModel, figures: dict[str, float] | None = None
) -> Makespan:
    """Simulates the kernels.

    Args:
        plan: for the device.
        seq_lens: [num_requests] int64 KV lengths by batch index.
        device: gives the workers and the work tiles of narrow items; two workers to an SM.
        figures: of the machine; None: those of an H200 and the shape.

    Raises:
        ValueError: seq_lens of another length, or figures that are not positive.
    """
    machine = _native.Machine()
    if figures is None:
        figures = figures_of(gpu.H200.name, shape)
    for name, value in figures.items():
        setattr(machine, name, value)
    machine.resident_ctas, machine.few_ctas = device.workers, max(1, device.workers // 2)
    machine.narrow_parts = device.narrow_parts
    machine.narrow_rows = WARP_ROWS * device.narrow_parts if shape.head_dim <= WIDEST_HEAD_OF_WARPS else 0
    found = _native.simulate_makespan(plan, seq_lens, _native.ModelShape(**asdict(shape)), machine)
    return Makespan(found.seconds, found.streaming, found.longest, found.work)
