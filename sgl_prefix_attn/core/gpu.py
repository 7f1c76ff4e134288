"""A GPU as its driver describes it, and the planner's model of it.

The planner's figures were fitted on an H200. Other GPUs get what the driver tells, times ratios that hold on an H200.
What a driver does not tell is that of the known GPU that speaks for the compute capability (`gpus.KnownGpu`). Every
figure but the driver's is a guess on these GPUs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.limits import TRITON_TILE_ROWS
from sgl_prefix_attn.core.planner import H200_RATES, DeviceModel, GpuRates, ModelShape
from sgl_prefix_attn.gpus import KnownGpu, known_gpu, known_gpus

_PRODUCT_SHARE = 0.6  # of the tensor cores' rate, rounded up from the best tiles of an H200
_NARROWEST_WHOLE_TILE = 32  # rows: without it a plan has only items of one warp, or no tiles at all
_HALF_RATE = "GeForce"  # sums in fp32 take twice as long there, from 8.6 on


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: CUDA's.
        capability: compute capability.
        sm_count: SMs.
        clock: most Hz of an SM.
        memory: bytes per second by memory clock and bus width.
        guessed: whether clock or memory are not the driver's but of another GPU with this compute capability.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    clock: float
    memory: float
    guessed: bool = False

    @classmethod
    def of_properties(cls, properties: Any) -> Gpu:
        """The GPU of `torch.cuda.get_device_properties`. Clocks that a torch or a driver does not tell are guessed."""
        capability = (properties.major, properties.minor)
        like = _architecture(capability)
        clock = 1e3 * getattr(properties, "clock_rate", 0)  # from kHz
        # Two transfers a clock, whatever the memory's type: drivers state the clock of GDDR6X and GDDR7 for that.
        pins = getattr(properties, "memory_bus_width", 0)
        memory = 2 * 1e3 * getattr(properties, "memory_clock_rate", 0) * pins / 8
        guessed = not (clock and memory)
        return cls(
            properties.name, capability, properties.multi_processor_count, clock or like.clock,
            memory or like.bandwidth, guessed,
        )  # fmt: skip

    @classmethod
    def of_file(cls, known: KnownGpu) -> Gpu:
        """The GPU of a file that has its clock and bandwidth."""
        return cls(known.name, known.capability, known.sm_count, known.clock, known.bandwidth)

    @property
    def is_fitted(self) -> bool:
        """Whether the planner's figures were fitted on such a GPU."""
        return self.name in _fitted()

    def rates(self) -> GpuRates:
        """What the planner takes: fitted figures where there are some, else an H200's, scaled."""
        if self.is_fitted:
            return _fitted()[self.name]
        bandwidth = H200_RATES.bandwidth / H200.memory * self.memory  # the share that kernels read on an H200
        sm_clocks = self.sm_count * self.clock
        tensor_flops = _architecture(self.capability).tensor_flops
        if _HALF_RATE in self.name and self.capability >= (8, 6):
            tensor_flops //= 2
        return GpuRates(
            H200_RATES.figures,
            bandwidth,
            clocks=sm_clocks / (H200.sm_count * H200.clock),
            bandwidth_per_sm=(bandwidth / self.sm_count) / (H200_RATES.bandwidth / H200.sm_count),
            most_flops=_PRODUCT_SHARE * tensor_flops * sm_clocks,
        )

    def origin(self) -> str:
        """Where the planner's figures are from, in words."""
        if self.is_fitted:
            return "fitted on this kind of GPU"
        of = (
            f"guessed by compute capability {self.capability[0]}.{self.capability[1]}"
            if self.guessed
            else "the driver's"
        )
        return f"{self.memory / 1e12:.2f} TB/s and {self.clock / 1e9:.2f} GHz ({of}), the rest scaled from an H200"


H200 = Gpu.of_file(known_gpu("h200"))


@functools.cache
def _fitted() -> dict[str, GpuRates]:
    """Rates by CUDA's name, of GPUs with fitted figures."""
    return {gpu.name: GpuRates.fitted(gpu.planner) for gpu in known_gpus().values() if gpu.planner is not None}


def _architecture(capability: tuple[int, int]) -> KnownGpu:
    """The GPU that speaks for a compute capability, else for the newest before it."""
    speak = {gpu.capability: gpu for gpu in known_gpus().values() if gpu.tensor_flops}
    return speak[max((known for known in speak if known <= capability), default=min(speak))]


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a CUDA device; an H200 for a CPU, where interpreted kernels replace one."""
    if device.type != "cuda":
        return H200
    return _gpu_of(torch.cuda.current_device() if device.index is None else device.index)


def current_gpu() -> Gpu:
    """The current CUDA device's; an H200 without one, as in `gpu_of`."""
    return gpu_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@functools.cache
def _gpu_of(index: int) -> Gpu:
    return Gpu.of_properties(torch.cuda.get_device_properties(index))


def planner_model(gpu: Gpu, shape: ModelShape, code: int | None, *, max_tile_rows: int = 128) -> DeviceModel:
    """The planner's model of a GPU and the kernels that run there.

    Args:
        shape: attention shape of one rank.
        code: compute capability, 10 * major + minor, of the native kernels' code (`limits.code_capability`); None: the
            Triton kernels.
        max_tile_rows: rows of the widest tile that a plan may have; at most those of the kernels, and at least 32.
    """
    max_tile_rows = max(max_tile_rows, _NARROWEST_WHOLE_TILE)
    if code is None:
        max_tile_rows = min(max_tile_rows, TRITON_TILE_ROWS)
    # Triton launches two programs for each SM.
    ctas = {} if code is None else {"ctas_per_sm": _native.ctas_per_sm(code), "cta_warps": _native.cta_warps(code)}
    return DeviceModel.gpu(
        gpu.sm_count, head_dim=shape.head_dim, group=shape.group, rates=gpu.rates(), max_tile_rows=max_tile_rows,
        kv_bytes=shape.kv_bytes, warpgroup_products=code is not None and code // 10 == 9, **ctas,
    )  # fmt: skip
