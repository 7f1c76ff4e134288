"""Builds the native module: planner and CPU executor in C++17, and the CUDA part if nvcc is found.

Every call compiles everything. A compiler cache makes that short: `CC="ccache cc" CXX="ccache c++"`.

PREFIXPACK_CUDA=auto|0|1      build the CUDA part (default auto: if nvcc is in CUDA_HOME/bin or on PATH)
PREFIXPACK_CUDA_ARCHS="..."   CUDA architectures (default "80;90a"); "80+PTX" adds PTX for newer GPUs
PREFIXPACK_BUILD_JOBS=N       parallel compiler processes (default: all cores)
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CPP_FOLDERS = ("plan", "cpu", "cuda", "offline", "bindings")
CXX_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-ffp-contract=fast"]


def find_nvcc() -> str | None:
    """Path of nvcc as asked for by PREFIXPACK_CUDA, or None for a CPU-only build."""
    choice = os.environ.get("PREFIXPACK_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"PREFIXPACK_CUDA={choice!r}: expected auto, 0 or 1")
    if choice == "0":
        return None
    nvcc = None
    if cuda_home := os.environ.get("CUDA_HOME"):
        nvcc = shutil.which("nvcc", path=f"{cuda_home}/bin")
        if nvcc is None:
            print(f"setup.py: warning: no nvcc in CUDA_HOME={cuda_home}/bin; looking for nvcc on PATH", file=sys.stderr)
    nvcc = nvcc or shutil.which("nvcc")
    if nvcc is None and choice == "1":
        raise SystemExit("PREFIXPACK_CUDA=1, but nvcc is neither in CUDA_HOME/bin nor on PATH")
    return nvcc


def cuda_library_dirs(nvcc: str) -> list[str]:
    """Library folders of nvcc. nvcc itself is asked, as it may be a wrapper script outside its toolkit."""
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    steps = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    libraries = re.search(r"^#\$ LIBRARIES=(.*)$", steps, re.MULTILINE)
    return re.findall(r"-L([^\s\"]+)", libraries.group(1)) if libraries else []


def cuda_targets() -> list[str]:
    """Values of nvcc's -gencode."""
    archs = [arch for arch in os.environ.get("PREFIXPACK_CUDA_ARCHS", "80;90a").replace(",", ";").split(";") if arch]
    targets = []
    for arch in archs:
        name = arch.removesuffix("+PTX")
        if not name.rstrip("af").isdigit():
            raise SystemExit(f"PREFIXPACK_CUDA_ARCHS: {arch!r} is not an architecture; expected for example '80;90a'")
        targets.append(f"arch=compute_{name},code=sm_{name}")
        if arch.endswith("+PTX"):
            targets.append(f"arch=compute_{name},code=compute_{name}")
    return targets


def build_jobs() -> int:
    return int(os.environ.get("PREFIXPACK_BUILD_JOBS") or os.cpu_count() or 1)


def sources(folder: str, suffix: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / folder).rglob(f"*{suffix}"))


class BuildNative(build_ext):
    """Compiles .cu files with nvcc and links them, with a static CUDA runtime, into the extension."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        nvcc = find_nvcc()
        if nvcc is not None:
            ext.define_macros.append(("PREFIXPACK_WITH_CUDA", "1"))
            with ThreadPoolExecutor(build_jobs()) as pool:
                ext.extra_objects = list(pool.map(functools.partial(self._compile_cuda, nvcc), sources("cuda", ".cu")))
            ext.library_dirs += cuda_library_dirs(nvcc)
            ext.libraries += ["cudart_static", "dl", "rt"]
        self.force = True  # setuptools compares times, of .cpp files only
        super().build_extension(ext)

    def _compile_cuda(self, nvcc: str, source: str) -> str:
        out = Path(self.build_temp) / (source.replace("/", "_") + ".o")
        out.parent.mkdir(parents=True, exist_ok=True)
        gencode = [word for target in cuda_targets() for word in ("-gencode", target)]
        flags = ["-O3", "-std=c++17", "-Icsrc", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        command = [nvcc, *flags, *gencode, "-c", source, "-o", str(out)]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True, cwd=ROOT)
        return str(out)


ParallelCompile("PREFIXPACK_BUILD_JOBS", default=os.cpu_count() or 1).install()


def python_packages() -> list[str]:
    """Packages of the wheel. The shims are data: the installer builds them where it runs."""
    folders = sorted(path.parent.relative_to(ROOT) for path in (ROOT / "sgl_prefix_attn").rglob("__init__.py"))
    return [".".join(folder.parts) for folder in folders if "sglang_cpu" not in folder.parts]


setup(
    packages=python_packages(),
    package_data={
        "sgl_prefix_attn": ["py.typed", "*.pyi", "**/*.jsonl", "**/*.md", "**/*.toml"],
        "sgl_prefix_attn.installer": ["*.txt", "sglang_cpu/*", "sglang_cpu/sgl_kernel/*.py"],
    },
    ext_modules=[
        Pybind11Extension(
            "sgl_prefix_attn._native",
            [source for folder in CPP_FOLDERS for source in sources(folder, ".cpp")],
            include_dirs=["csrc"],
            extra_compile_args=CXX_FLAGS,
            extra_link_args=["-pthread"],
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
