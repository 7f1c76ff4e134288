"""Builds the GPU kernels for the CPU, on top of emulated instructions."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
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
    """The module `cuda_emulation` for a compute capability (10 * major + minor), rebuilt when a source has changed."""
    sources = [*sorted(EMULATION.rglob("*.[ch]*")), *sorted((ROOT / "csrc").rglob("*.[ch]*"))]
    stamp = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = ROOT / ".cache" / "cuda_emulation" / f"{stamp}-{capability}"
    built = folder / f"cuda_emulation{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        includes = [sysconfig.get_paths()["include"], pybind11.get_include(), str(EMULATION), str(ROOT / "csrc")]
        partial = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                os.environ.get("CXX", "g++"), "-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas",
                "-U_FORTIFY_SOURCE",  # its longjmp knows one stack only
                *F16C, f"-DPREFIXPACK_EMULATED_CAPABILITY={capability}", *(f"-I{path}" for path in includes),
                str(EMULATION / "module.cpp"), str(ROOT / "csrc/cuda/serialize_plan.cpp"),
                str(ROOT / "csrc/cuda/combine_lists.cpp"), str(ROOT / "csrc/plan/deferral.cpp"), "-o", str(partial),
            ],
            check=True,
        )  # fmt: skip
        partial.rename(built)
    spec = importlib.util.spec_from_file_location("cuda_emulation", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
