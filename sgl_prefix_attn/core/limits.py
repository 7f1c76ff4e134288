"""Limits of the attention kernels, shared by everything that checks them before a call."""

from __future__ import annotations

import functools

import torch

from sgl_prefix_attn import _native

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
TRITON_TILE_ROWS = 64  # of the widest tile with which plans fit the Triton kernels best
OLDEST_CAPABILITY = (8, 0)
# Compute capabilities whose native code has run on a GPU. Code for others is compiled, and partly emulated: it runs
# where `gpu_kernels=native` asks for it.
TESTED_CODE = frozenset({90})


def head_dim_fits(head_dim: int) -> bool:
    """Whether the CPU executor has kernels for heads of this size: a multiple of 16 up to 256."""
    return 0 < head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_STEP == 0


def why_not_native(device: torch.device, *, asked: bool = False) -> str | None:
    """Why a GPU does not get the native kernels, in words; None if it does. asked: whether the settings name them."""
    if not _native.built_with_cuda:
        return "sgl_prefix_attn was built without CUDA: reinstall it with nvcc on PATH"
    problem = unsupported_gpu(device)
    if problem is None and not asked and (doubt := untested_gpu(device)) is not None:
        return f"{doubt}; gpu_kernels=native chooses them"
    return problem


def unsupported_gpu(device: torch.device) -> str | None:
    """Why the native CUDA kernels cannot run on a GPU, in words; None if they can. Asks the driver."""
    if torch.version.hip is not None:
        return "the native kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"the native kernels need compute capability {_text(OLDEST_CAPABILITY)}, the GPU has {_text(capability)}"
    rebuild = f"build with PREFIXPACK_CUDA_ARCHS={capability[0]}{capability[1]}{'a' if capability == (9, 0) else ''}"
    try:
        code = code_capability(device)
    except RuntimeError as error:
        return f"the native kernels have no code for compute capability {_text(capability)}: {error}; {rebuild}"
    needed, room = _native.cta_shared_bytes(code), shared_bytes_per_cta(device)
    if needed > room:
        return (
            f"the native kernels' code for compute capability {_text(divmod(code, 10))} needs {-(-needed // 1024)} KiB "
            f"of shared memory per CTA, the GPU ({_text(capability)}) has {room // 1024} KiB: {rebuild}"
        )
    return None


def untested_gpu(device: torch.device) -> str | None:
    """Why the native kernels are not the default on a GPU that they support, in words; None if they are."""
    code = code_capability(device)
    if code in TESTED_CODE:
        return None
    return f"the native kernels' code for compute capability {_text(divmod(code, 10))} has never run on a GPU"


def code_capability(device: torch.device) -> int:
    """Compute capability, 10 * major + minor, for which the native code that a GPU would run was compiled.

    Every `packed_attention` on a GPU asks; the driver is asked once.

    Raises:
        RuntimeError: there is no such code, in the driver's words.
    """
    return _code_capability(_index(device))


@functools.cache
def _code_capability(index: int) -> int:
    with torch.cuda.device(index):
        return _native.cuda_code_capability()


def shared_bytes_per_cta(device: torch.device) -> int:
    """Shared memory that a CTA can have on a GPU."""
    return _shared_bytes(_index(device))


@functools.cache
def _shared_bytes(index: int) -> int:
    return _native.cuda_devices()[index].shared_memory_per_block


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
