"""Builds extension modules that only benchmarks and tests use, once for each content of their sources."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[1]


def disassembler() -> str | None:
    """cuobjdump on PATH, or the one that Triton brings along."""
    triton = importlib.util.find_spec("triton")
    brought = [Path(place) / "backends/nvidia/bin" for place in (triton and triton.submodule_search_locations) or ()]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, brought)]))


def built_module(name: str, sources: Sequence[Path], *, options: Sequence[str], depends: Sequence[Path]) -> ModuleType:
    """An extension module in C++17 over `csrc`, rebuilt when something it is made of has changed.

    Args:
        name: of the module.
        sources: files to compile.
        options: of the compiler.
        depends: files that are read, sources of the package left out.
    """
    read = [*depends, *sorted((ROOT / "csrc").rglob("*.[ch]*"))]
    made_of = b"\0".join([*(option.encode() for option in options), *(path.read_bytes() for path in read)])
    folder = ROOT / ".cache" / name / hashlib.sha256(made_of).hexdigest()[:16]
    built = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        includes = [sysconfig.get_paths()["include"], pybind11.get_include(), str(ROOT / "csrc")]
        partial = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                os.environ.get("CXX", "g++"), "-std=c++17", "-shared", "-fPIC", "-Wall", *options,
                *(f"-I{path}" for path in includes), *map(str, sources), "-o", str(partial),
            ],
            check=True,
        )  # fmt: skip
        partial.rename(built)
    spec = importlib.util.spec_from_file_location(name, built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
