"""Which code a result comes from."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Iterable
from pathlib import Path

import sgl_prefix_attn


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """Of installed packages, None where one is not, and of this project's code, whatever its metadata says."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions | {"sgl-prefix-attn": sgl_prefix_attn.__version__}


def git_commit() -> str | None:
    """HEAD of the checkout that this file lies in; None without one."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
