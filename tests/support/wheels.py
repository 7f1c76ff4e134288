"""Published SGLang wheels for tests: fetched once with pip into a cache folder, read without being installed.

The folder is `.cache/wheels` in the repository root, or PREFIXPACK_WHEEL_CACHE. Wheels are only read as archives of
Python source, so one platform and one CPython do for every machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# sglang wheels carry native code and so are built per CPython and platform; their Python source is the same in all.
_PYTHON_VERSION = "3.11"
_PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64", "any")
_FETCH_TIMEOUT_SECONDS = 300


class WheelUnavailableError(Exception):
    """pip could not fetch a wheel; the message is pip's reason."""


def wheel_cache() -> Path:
    return Path(os.environ.get("PREFIXPACK_WHEEL_CACHE") or REPOSITORY / ".cache" / "wheels")


def sglang_wheel(version: str) -> Path:
    """Path of the published wheel of SGLang `version`. WheelUnavailableError if not cached and not to be fetched."""
    wheel = _cached_or_fetched(version)
    if isinstance(wheel, str):
        raise WheelUnavailableError(wheel)
    return wheel


@cache
def _cached_or_fetched(version: str) -> Path | str:
    """The wheel, or the reason why there is none. A failed fetch is not repeated."""
    folder = wheel_cache()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{version}.lock").open("w") as lock:  # two test workers may need the same wheel
        fcntl.flock(lock, fcntl.LOCK_EX)
        cached = sorted(folder.glob(f"sglang-{version}-*.whl"))
        return cached[0] if cached else _fetch(version, folder)


def _fetch(version: str, folder: Path) -> Path | str:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={_PYTHON_VERSION}"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command += ["--dest", scratch, f"sglang=={version}"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"pip needed over {_FETCH_TIMEOUT_SECONDS} s for sglang {version}"
        wheels = sorted(Path(scratch).glob(f"sglang-{version}-*.whl"))
        if result.returncode or not wheels:
            reason = (result.stderr.strip() or "pip said nothing").splitlines()[-1]
            return f"pip could not fetch sglang {version}: {reason}"
        return wheels[0].rename(folder / wheels[0].name)


def published_source(version: str) -> Path:
    """The wheel of SGLang `version`; if it is not to be had, the folder of the installed SGLang, if it is that one."""
    try:
        return sglang_wheel(version)
    except WheelUnavailableError:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.distribution("sglang")
            if installed.version == version:
                return Path(str(installed.locate_file("")))
        raise
