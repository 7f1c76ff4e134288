"""The Triton kernels without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    triton, numpy = (tuple(int(part) for part in version(name).split(".")[:2]) for name in ("triton", "numpy"))
    if triton <= (3, 6) and numpy >= (2, 4):
        return "the interpreter of Triton up to 3.6 needs numpy up to 2.3"
    return None


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_kernels_in_tritons_interpreter() -> None:
    """A process of its own, since Triton decides at import, for every kernel of the process, who runs them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error::pytest.PytestUnknownMarkWarning",
         "tests/cuda/test_triton_kernels.py"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, cwd=ROOT, check=False, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
