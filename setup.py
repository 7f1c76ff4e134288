"""Builds the native module: planner and CPU executor in C++17, and the CUDA part if nvcc is found.

Objects of an earlier build are used again if their source, what it includes, and the compiler's options are the same.
Linking takes a second and is always done.

PREFIXPACK_CUDA=auto|0|1      build the CUDA part (default auto: if nvcc is in CUDA_HOME/bin or on PATH)
PREFIXPACK_CUDA_ARCHS="..."   CUDA architectures (default "80;90a"); "80+PTX" adds PTX for newer GPUs
PREFIXPACK_BUILD_JOBS=N       parallel compiler processes (default: all cores)
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pybind11
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


@functools.cache
def included(path: Path) -> frozenset[Path]:
    """The files of csrc that a file of csrc includes, and it itself."""
    found = {path}
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
        for header in (path.parent / name, ROOT / "csrc" / name):
            if header.is_file():
                found |= included(header.resolve())
                break
    return frozenset(found)


def digest(source: str, options: list[str]) -> str:
    """Of everything that an object depends on. By content: files of an archive may be older than the last build."""
    contents = [f"{path.relative_to(ROOT)}\0{path.read_text()}" for path in sorted(included(ROOT / source))]
    return hashlib.sha256("\0".join([*options, *contents]).encode()).hexdigest()


def compile_if_changed(out: Path, source: str, options: list[str], run: Callable[[], object]) -> None:
    """Calls `run`, which makes the object `out`, unless an earlier call made the same one."""
    stamp, made_of = out.with_name(f"{out.name}.stamp"), digest(source, options)
    if out.exists() and stamp.exists() and stamp.read_text() == made_of:
        return
    stamp.unlink(missing_ok=True)  # a stopped compiler leaves no object that seems whole
    run()
    stamp.write_text(made_of)


class BuildNative(build_ext):
    """Compiles .cu files with nvcc and links them, with a static CUDA runtime, into the extension."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        nvcc = find_nvcc()
        if nvcc is not None:
            ext.define_macros.append(("PREFIXPACK_WITH_CUDA", "1"))
            version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
            with ThreadPoolExecutor(build_jobs()) as pool:
                objects = pool.map(lambda source: self._compile_cuda(nvcc, version, source), sources("cuda", ".cu"))
                ext.extra_objects = list(objects)
            ext.library_dirs += cuda_library_dirs(nvcc)
            ext.libraries += ["cudart_static", "dl", "rt"]
        # Not the include folders: pip builds with a pybind11 in a folder of another name each time.
        options = [pybind11.__version__, sys.version, *self.compiler.compiler_so]
        options += getattr(self.compiler, "compiler_so_cxx", [])  # of setuptools that tell C from C++
        options += [*map(str, ext.define_macros), *ext.extra_compile_args]
        compile_cpp = self.compiler._compile

        def compile_changed(out: str, source: str, *arguments: Any) -> None:
            compile_if_changed(Path(out), source, options, lambda: compile_cpp(out, source, *arguments))

        self.compiler._compile = compile_changed
        # setuptools would compare times, of .cpp files only, and leave a module without what changed in other files.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)

    def _compile_cuda(self, nvcc: str, version: str, source: str) -> str:
        out = Path(self.build_temp) / (source.replace("/", "_") + ".o")
        out.parent.mkdir(parents=True, exist_ok=True)
        gencode = [word for target in cuda_targets() for word in ("-gencode", target)]
        flags = ["-O3", "-std=c++17", "-Icsrc", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        command = [nvcc, *flags, *gencode, "-c", source, "-o", str(out)]

        def run() -> None:
            print(" ".join(command), flush=True)
            subprocess.run(command, check=True, cwd=ROOT)

        compile_if_changed(out, source, [version, *command], run)
        return str(out)


# Each object is asked for; BuildNative compiles those that changed.
ParallelCompile("PREFIXPACK_BUILD_JOBS", default=os.cpu_count() or 1).install()


def python_packages() -> list[str]:
    """Packages of the wheel. The shims are data: the installer builds them where it runs."""
    folders = sorted(path.parent.relative_to(ROOT) for path in (ROOT / "sgl_prefix_attn").rglob("__init__.py"))
    return [".".join(folder.parts) for folder in folders if "sglang_cpu" not in folder.parts]


setup(
    packages=python_packages(),
    package_data={
        "sgl_prefix_attn": ["py.typed", "*.pyi", "**/*.jsonl", "**/*.md", "routing/profiles/*.json"],
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
