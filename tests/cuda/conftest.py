"""Builds the GPU kernels for the CPU, on top of emulated instructions."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.native_build import ROOT, built_module

EMULATION = Path(__file__).parent / "emulation"
CPU_INFO = Path("/proc/cpuinfo")
# Converts fp16 by an instruction. A call for each number takes a sixth of the time of the tests.
F16C = ["-mf16c"] if CPU_INFO.exists() and " f16c " in CPU_INFO.read_text() else []


@pytest.fixture(scope="session")
def emulation() -> ModuleType:
    """The kernels as compiled for compute capability 9.0."""
    return emulation_of(90)


# A build takes 18 s of a core. In CI, the one with less shared memory stands for both.
BUILDS = [pytest.param(80, marks=pytest.mark.slow, id="sm_80"), pytest.param(86, id="sm_86")]


@pytest.fixture(scope="session", params=BUILDS)
def emulation_without_wgmma(request: pytest.FixtureRequest) -> ModuleType:
    """The kernels as compiled for 8.0, and for GPUs with 99 KiB of shared memory for a CTA."""
    return emulation_of(request.param)


@functools.cache
def emulation_of(capability: int) -> ModuleType:
    """The module `cuda_emulation` for a compute capability (10 * major + minor)."""
    compiled = ("cuda/serialize_plan.cpp", "cuda/combine_lists.cpp", "plan/deferral.cpp")
    return built_module(
        "cuda_emulation",
        [EMULATION / "module.cpp", *(ROOT / "csrc" / name for name in compiled)],
        options=[
            "-O1", "-Wno-unknown-pragmas",
            "-U_FORTIFY_SOURCE",  # its longjmp knows one stack only
            *F16C, f"-DPREFIXPACK_EMULATED_CAPABILITY={capability}", f"-I{EMULATION}",
        ],
        depends=sorted(EMULATION.rglob("*.[ch]*")),
    )  # fmt: skip
