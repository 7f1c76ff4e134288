"""Where a result comes from: machine, versions and the environment that servers inherit."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from benchmarks.provenance import cpu_name, versions_of

PACKAGES = ("sglang", "sglang-kernel", "flashinfer-python", "torch")
# Variables that change what a server does or how its ranks talk.
_PREFIXES = ("GLOO_", "NCCL_", "NVSHMEM_", "OMP_", "PREFIXPACK_", "SGLANG_", "TORCH")


def package_versions() -> dict[str, str | None]:
    """Versions of what takes part; None where it is not installed."""
    return versions_of(PACKAGES)


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
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return cpu_name()
