"""Limits of the attention kernels, shared by everything that checks them before a call."""

from __future__ import annotations

import torch

from sgl_prefix_attn import _native

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
OLDEST_CAPABILITY = (8, 0)
# Compute capabilities with less shared memory for a CTA than others (CUDA programming guide), and how much.
LITTLE_SHARED_MEMORY = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})
LITTLE_SHARED_BYTES = 99 * 1024


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
    needed_bytes = _native.cta_shared_bytes
    if capability in LITTLE_SHARED_MEMORY and needed_bytes > LITTLE_SHARED_BYTES:
        found, needed_kib = ".".join(map(str, capability)), -(-needed_bytes // 1024)
        return (
            f"the native kernels need {needed_kib} KiB of shared memory per CTA, compute capability {found} has "
            f"{LITTLE_SHARED_BYTES // 1024} KiB"
        )
    return None
