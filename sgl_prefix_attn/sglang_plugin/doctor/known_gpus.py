"""GPUs for which the doctor can answer on another machine. Data only: the command line reads it before any import."""

from __future__ import annotations

from typing import NamedTuple


class KnownGpu(NamedTuple):
    """A GPU as its driver describes it.

    Attributes:
        name: CUDA's.
        capability: compute capability.
        memory_mib: all memory, as nvidia-smi tells it.
        sm_count: SMs.
    """

    name: str
    capability: tuple[int, int]
    memory_mib: int
    sm_count: int

    @property
    def shared_memory_per_block(self) -> int:
        """Shared memory in bytes that a CTA can have. From CUDA's table of compute capabilities."""
        return {(8, 0): 163, (8, 6): 99, (8, 9): 99, (12, 0): 99}.get(self.capability, 227) << 10


KNOWN_GPUS = {
    "a100": KnownGpu("NVIDIA A100-SXM4-80GB", (8, 0), 81920, 108),
    "a100-40gb": KnownGpu("NVIDIA A100-SXM4-40GB", (8, 0), 40960, 108),
    "a10": KnownGpu("NVIDIA A10", (8, 6), 23028, 72),
    "a6000": KnownGpu("NVIDIA RTX A6000", (8, 6), 49140, 84),
    "rtx3090": KnownGpu("NVIDIA GeForce RTX 3090", (8, 6), 24576, 82),
    "l4": KnownGpu("NVIDIA L4", (8, 9), 23034, 58),
    "l40s": KnownGpu("NVIDIA L40S", (8, 9), 46068, 142),
    "rtx4090": KnownGpu("NVIDIA GeForce RTX 4090", (8, 9), 24564, 128),
    "h20": KnownGpu("NVIDIA H20", (9, 0), 97871, 78),
    "h100": KnownGpu("NVIDIA H100 80GB HBM3", (9, 0), 81559, 132),
    "h200": KnownGpu("NVIDIA H200", (9, 0), 143771, 132),
    "b200": KnownGpu("NVIDIA B200", (10, 0), 183359, 148),
    "rtx5090": KnownGpu("NVIDIA GeForce RTX 5090", (12, 0), 32607, 170),
    "rtxpro6000": KnownGpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 97887, 188),
}
