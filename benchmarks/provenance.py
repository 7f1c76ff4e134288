"""Where a result comes from: code, machine, versions and the environment that servers inherit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sgl_prefix_attn

PACKAGES = ("sglang", "sglang-kernel", "flashinfer-python", "torch")
# Variables that change what a server does or how its ranks talk.
_PREFIXES = ("GLOO_", "NCCL_", "NVSHMEM_", "OMP_", "PREFIXPACK_", "SGLANG_", "TORCH")


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Versions of installed packages, None where one is not, and of this project's code, whatever its metadata says."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions | {"sgl-prefix-attn": sgl_prefix_attn.__version__}


def inherited_environment() -> dict[str, str]:
    """Variables of this process that every server sees and that matter to it, by name."""
    return {name: without_folders(value) for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def arguments_of(args: Any) -> dict[str, str]:
    """Arguments of a benchmark by name."""
    return {name: without_folders(str(value)) for name, value in vars(args).items() if value is not None}


def without_folders(text: str) -> str:
    """The text with the last name of each absolute path only: results do not depend on where files lie."""
    return re.sub(r"(?<![\w./])/(?:[^\s/'\",]+/)*([^\s/'\",]+)", r"\1", text)


def machine_name() -> str:
    """The first GPU's name, else the processor's."""
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or cpu_name()


def cpu_name() -> str:
    """The processor's model name as Linux gives it, else what Python knows of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_commit() -> str | None:
    """HEAD of the checkout that this file lies in; None without one."""
    return _output("git", "rev-parse", "HEAD")


def _output(*command: str) -> str | None:
    """The first line that a command prints; None if there is none, or no such command."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
