"""Which code a result comes from, and which processor."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import sgl_prefix_attn


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of installed packages, None where one is not, and of this project's code, whatever its metadata says."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions | {"sgl-prefix-attn": sgl_prefix_attn.__version__}


def cpu_name() -> str:
    """The processor's model name as Linux gives it, else what Python knows of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_commit() -> str | None:
    """HEAD of the checkout that this file lies in; None without one."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
