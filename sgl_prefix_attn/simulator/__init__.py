"""When the GPU kernels would be done with a plan: a simulation on the CPU.

Workers share the bandwidth and each has a rate of its own. Units take time to begin and to end, and the last partial of
a query waits for its combine. The figures of `H200` are fitted to committed times of one H200 with 16-bit KV and
head_dim 128; for other types and head sizes the simulation is some 20 % short.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan

# Fitted by coordinate search to half of the 171 cases of gpu_attention.json (numpy's default_rng(0), below 0.5).
H200 = {
    "bandwidth": 4.3e12,
    "begin": 7.92e-6,
    "warp_begin": 2.968e-6,
    "block_start": 0.8983e-6,
    "block_end": 2.135e-6,
    "warp_start": 2.259e-6,
    "warp_end": 0.1205e-6,
    "block_rate": 67.49e9,
    "warp_rate": 6.6e9,
    "flops32": 200e12,
    "flops64": 719.8e12,
    "flops128": 686.4e12,
    "lone_speedup": 1.6,
    "warp_flops": 600e12,
    "sibling": 0.3933,
    "block_merge": 2.609e-6,
    "warp_merge": 1.4e-6,
    "block_merge_step": 0.7412e-6,
    "warp_merge_step": 0.5165e-6,
}
WARP_ROWS = 8
WIDEST_HEAD_OF_WARPS = 128


@dataclass(frozen=True)
class Makespan:
    """Seconds of one layer.

    Attributes:
        seconds: to the end of the last unit.
        streaming: bytes of all units over the bandwidth.
        longest: of one unit by itself.
    """

    seconds: float
    streaming: float
    longest: float

    @property
    def lower_bound(self) -> float:
        """No order of the units is done sooner."""
        return max(self.streaming, self.longest)


def makespan(
    plan: Plan, seq_lens: Int64Array, shape: ModelShape, device: DeviceModel, figures: dict[str, float] | None = None
) -> Makespan:
    """Simulates the kernels.

    Args:
        plan: for the device.
        seq_lens: [num_requests] int64 KV lengths by batch index.
        device: gives the workers and the units of narrow items; two workers to an SM.
        figures: of the machine; None: H200.

    Raises:
        ValueError: seq_lens of another length, or figures that are not positive.
    """
    machine = _native.Machine()
    for name, value in (H200 if figures is None else figures).items():
        setattr(machine, name, value)
    machine.slots, machine.few_slots = device.workers, max(1, device.workers // 2)
    machine.narrow_units = device.narrow_units
    machine.narrow_rows = WARP_ROWS * device.narrow_units if shape.head_dim <= WIDEST_HEAD_OF_WARPS else 0
    return Makespan(*_native.simulate_makespan(plan, seq_lens, _native.ModelShape(**asdict(shape)), machine))
