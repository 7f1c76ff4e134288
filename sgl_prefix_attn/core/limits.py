"""Limits of the attention kernels, shared by everything that checks them before a call."""

from __future__ import annotations

import torch

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
OLDEST_CAPABILITY = (8, 0)
# With 99 KiB of shared memory for a CTA. The CTA kernel takes kLaunchSharedBytes (csrc/cuda/kernel/kernel_traits.cuh).
LITTLE_SHARED_MEMORY = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})


def head_dim_fits(head_dim: int) -> bool:
    """Whether the CPU executor has kernels for heads of this size: a multiple of 16 up to 256."""
    return 0 < head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_STEP == 0


def unsupported_gpu(device: torch.device) -> str | None:
    """Why the native CUDA kernels do not run on a GPU, in words; None if they do. Asks the driver."""
    if torch.version.hip is not None:
        return "the native kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (OLDEST_CAPABILITY, capability))
        return f"the native kernels need compute capability {needed}, the GPU has {found}"
    if capability in LITTLE_SHARED_MEMORY:
        found = ".".join(map(str, capability))
        return f"the native kernels need 113 KiB of shared memory per CTA, compute capability {found} has 99 KiB"
    return None
