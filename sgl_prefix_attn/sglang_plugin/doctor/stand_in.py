"""Another machine's GPU in place of this one's, for the decisions that SGLang and this package make before a start.

SGLang asks PyTorch for its GPU, so PyTorch answers for the other one. Modules that choose kernels when they are loaded
are loaded before: they would import libraries for a GPU. No kernel runs, and no memory is taken.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import gpu as own_gpu
from sgl_prefix_attn.core import limits
from sgl_prefix_attn.gpus import KnownGpu
from sgl_prefix_attn.sglang_plugin.compat.doctor_targets import (
    ARGUMENT_GROUPS,
    COMMON,
    PLATFORMS,
    PRELOADED,
    REPLACED_PROBES,
)

_GPUS_OF_A_HOST = 8
_CUDA = "13.0"
_ABSENT = object()


@contextlib.contextmanager
def standing_in(gpu: KnownGpu) -> Iterator[None]:
    """SGLang and this package see eight GPUs of a kind while the context is open.

    The native kernels count as built for the GPU's own compute capability.
    """
    _preload()
    common = importlib.import_module(COMMON)
    platforms = importlib.import_module(PLATFORMS)
    size = gpu.memory_mib << 20
    code = 10 * gpu.capability[0] + gpu.capability[1]
    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], total_memory=size, is_integrated=False,
        multi_processor_count=gpu.sm_count, shared_memory_per_block_optin=gpu.shared_memory_per_block,
    )  # fmt: skip
    probes: dict[str, Any] = {
        "get_nvgpu_memory_capacity": lambda: float(gpu.memory_mib),
        "is_flashinfer_available": lambda: True,  # SGLang for CUDA comes with it
        "get_device_sm": lambda: code,
    }
    assert probes.keys() == set(REPLACED_PROBES)
    with contextlib.ExitStack() as stack:
        stack.callback(_forget, common)
        for owner, values in (
            (torch.version, {"cuda": _CUDA, "hip": None}),
            (torch.cuda, _cuda(gpu, properties, size)),
            (_native, _native_module(gpu, code)),
        ):
            for name, value in values.items():
                stack.enter_context(_replaced(owner, name, value))
        for name, value in probes.items():
            stack.enter_context(_replaced_everywhere(name, getattr(common, name), value))
        before = platforms.current_platform
        stack.enter_context(_replaced(platforms, "_current_platform", platforms.CudaSRTPlatform()))
        stack.enter_context(_replaced_everywhere("current_platform", before, platforms.current_platform))
        _forget(common)
        yield


def _cuda(gpu: KnownGpu, properties: Any, size: int) -> dict[str, Any]:
    """What torch.cuda answers."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: _GPUS_OF_A_HOST,
        "current_device": lambda: 0,
        "device": lambda index: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (size, size),
    }


def _native_module(gpu: KnownGpu, code: int) -> dict[str, Any]:
    """What the native module of a package with CUDA answers on the GPU."""
    device = SimpleNamespace(shared_memory_per_block=gpu.shared_memory_per_block)
    return {
        "built_with_cuda": True,
        "cuda_code_capability": lambda: code,
        "cuda_devices": lambda: [device] * _GPUS_OF_A_HOST,
    }


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    groups = importlib.import_module(ARGUMENT_GROUPS)
    for found in pkgutil.iter_modules(groups.__path__, f"{ARGUMENT_GROUPS}."):
        importlib.import_module(found.name)


def _forget(common: Any) -> None:
    """Drops what functions remember of the GPU."""
    for function in (*vars(common).values(), limits._code_capability, limits._shared_bytes, own_gpu._gpu_of):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def _replaced_everywhere(name: str, old: Any, new: Any) -> Iterator[None]:
    """Replaces a global of SGLang in all modules that have imported it by name."""
    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang.") and vars(module).get(name) is old:
                stack.enter_context(_replaced(module, name, new))
        yield
