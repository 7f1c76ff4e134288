"""When the GPU kernels would be done with a plan: a simulation on the CPU.

Workers share the bandwidth and each has a rate of its own. Work tiles take time to begin and to end, and the last
partial of a query waits for its combine. `H200` and `H200_KERNELS` are fitted to times of drawn batches on one H200.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.gpu import FITTED_GPU
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan

SIMULATED_GPU = FITTED_GPU
# Of KV in 16 bits and head_dim 128. Fitted by coordinate search to drawn batches of dev seeds 2 and 6 and to verify
# steps of two seeds. Checked on batches and verify steps of others: median error 4 and 3 %.
H200: dict[str, float] = {
    "bandwidth": 4.3e12,
    "begin": 6.291e-06,
    "warp_begin": 1.893e-06,
    "cta_start": 2.0e-06,
    "cta_end": 2.1e-06,
    "warp_start": 2.46e-06,
    "warp_end": 5.699e-08,
    "cta_rate": 6.526e10,
    "warp_rate": 6.524e09,
    "flops32": 1.75e14,
    "flops64": 3.15e14,
    "flops128": 5.8e14,
    "key_tile": 64,
    "lone_speedup": 1.435,
    "warp_flops": 6e14,
    "sibling": 0.8511,
    "cta_combine": 1.461e-06,
    "warp_combine": 1.858e-06,
    "cta_combine_step": 8.5e-07,
    "warp_combine_step": 7.97e-07,
    "deferred_combine": 5e-06,
    "deferred_combine_step": 4.6e-07,
}
# What differs for other kernels, by head_dim and bytes of a KV element; median errors on drawn batches of 6 to 7 %.
H200_KERNELS: dict[tuple[int, int], dict[str, float]] = {
    (128, 1): {
        "lone_speedup": 1.223,
        "key_tile": 1,
        "cta_combine_step": 1.011e-06,
        "deferred_combine_step": 7e-07,
        "cta_start": 1.502e-06,
        "cta_end": 1.652e-06,
        "warp_start": 5.455e-06,
        "warp_end": 6.448e-08,
        "warp_rate": 3.493e09,
        "flops32": 1.849e14,
        "flops64": 3.3e14,  # as flops128 not fitted, but checked: a fit to 41 batches of one seed was worse on another
        "flops128": 4.5e14,
        "sibling": 1.311,
    },
    (64, 2): {
        "lone_speedup": 1.223,
        "cta_start": 2.227e-06,
        "cta_end": 1.422e-06,
        "warp_start": 5.455e-06,
        "warp_end": 5.968e-07,
        "warp_rate": 4.006e09,
        "flops32": 1.46e14,
        "flops64": 3.31e14,
        "flops128": 4.96e14,
        "sibling": 1.71,
    },
    (256, 2): {
        "lone_speedup": 1.223,
        "key_tile": 32,
        "cta_start": 2.253e-06,
        "cta_end": 3.012e-06,
        "flops32": 2.533e14,
        "flops64": 3.863e14,
        "sibling": 0.6152,
    },
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


def knows(shape: ModelShape) -> bool:
    """Whether there are figures of the kernels of this head_dim and KV type."""
    return (shape.head_dim, shape.kv_bytes) in {(128, 2), *H200_KERNELS}


def makespan(
    plan: Plan, seq_lens: Int64Array, shape: ModelShape, device: DeviceModel, figures: dict[str, float] | None = None
) -> Makespan:
    """Simulates the kernels.

    Args:
        plan: for the device.
        seq_lens: [num_requests] int64 KV lengths by batch index.
        device: gives the workers and the work tiles of narrow items; two workers to an SM.
        figures: of the machine; None: H200.

    Raises:
        ValueError: seq_lens of another length, or figures that are not positive.
    """
    machine = _native.Machine()
    if figures is None:
        figures = H200 | H200_KERNELS.get((shape.head_dim, shape.kv_bytes), {})
    for name, value in figures.items():
        setattr(machine, name, value)
    machine.slots, machine.few_slots = device.workers, max(1, device.workers // 2)
    machine.narrow_parts = device.narrow_parts
    machine.narrow_rows = WARP_ROWS * device.narrow_parts if shape.head_dim <= WIDEST_HEAD_OF_WARPS else 0
    return Makespan(*_native.simulate_makespan(plan, seq_lens, _native.ModelShape(**asdict(shape)), machine))
