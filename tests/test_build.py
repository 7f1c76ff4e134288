"""setup.py leaves no old object in the module. The compilers here only write down what they are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Build = Callable[..., tuple[set[str], str]]
SOURCES = {
    "csrc/plan/a.cpp": '#include "plan/a.h"\n',
    "csrc/plan/a.h": '#include "plan/inner.h"\n',
    "csrc/plan/inner.h": "",
    "csrc/bindings/b.cpp": "",
    "csrc/cuda/k.cu": '#include "cuda/k.cuh"\n',
    "csrc/cuda/k.cuh": '#include "plan/inner.h"\n',
}
# An object or a module holds the command that made it.
COMPILER = """#!/bin/sh
echo "$0 $*" >>"$LOG"
for word in "$@"; do
  test "$last" = -o && out=$word
  last=$word
done
test -z "$out" || echo "$*" >"$out"
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Runs setup.py in a project of a few files; returns the sources that it compiled, and the module."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "setup.py", tmp_path)
    log = tmp_path / "log"
    for name in ("c++", "nvcc"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(COMPILER)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDA_HOME", "PREFIXPACK_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    compiler = str(tmp_path / "bin" / "c++")
    environment = {
        "CC": compiler, "CXX": compiler, "LOG": str(log), "PREFIXPACK_CUDA": "0",
        "PREFIXPACK_BUILD_JOBS": "1", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }  # fmt: skip

    def run(**variables: str) -> tuple[set[str], str]:
        log.unlink(missing_ok=True)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "lib", "--build-temp", "temp"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment, **variables}, check=True)
        lines = log.read_text().splitlines() if log.exists() else []
        compiled = {name for name in SOURCES for line in lines if f"-c {name}" in line}
        (module,) = tmp_path.glob("lib/sgl_prefix_attn/_native*.so")
        return compiled, module.read_text()

    return run


CPP = {"csrc/plan/a.cpp", "csrc/bindings/b.cpp"}


def test_whatever_changed_is_in_the_module(build: Build, tmp_path: Path) -> None:
    assert build()[0] == CPP
    header = tmp_path / "csrc/plan/inner.h"
    header.write_text("// changed\n")
    os.utime(header, (0, 0))  # as an archive brings it
    assert build()[0] == CPP


def test_the_module_has_the_cuda_part_that_is_asked_for(build: Build, tmp_path: Path) -> None:
    kernel = "csrc/cuda/k.cu"
    assert "k.cu.o" not in build()[1]
    compiled, module = build(PREFIXPACK_CUDA="1")
    assert compiled == CPP | {kernel}
    assert "k.cu.o" in module
    build(PREFIXPACK_CUDA="1", PREFIXPACK_CUDA_ARCHS="89")
    assert "code=sm_89" in (tmp_path / "temp/csrc_cuda_k.cu.o").read_text()
    assert "k.cu.o" not in build()[1]
