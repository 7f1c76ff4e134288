"""Published SGLang wheels for tests: fetched once with pip into a cache folder, read without being installed.

The folder is `.cache/wheels` in the repository root, or PREFIXPACK_WHEEL_CACHE. Wheels are only read as archives of
Python source, so one platform and one CPython do for every machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Collection
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


@cache
def sglang_wheel(version: str) -> Path:
    """Path of the published wheel of SGLang `version`. WheelUnavailableError if not cached and not to be fetched."""
    folder = wheel_cache()
    folder.mkdir(parents=True, exist_ok=True)
    cached = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if cached:
        return cached[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={_PYTHON_VERSION}"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    command += ["--dest", str(folder), f"sglang=={version}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise WheelUnavailableError(f"pip needed over {_FETCH_TIMEOUT_SECONDS} s for sglang {version}") from None
    cached = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if result.returncode or not cached:
        reason = (result.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise WheelUnavailableError(f"pip could not fetch sglang {version}: {reason}")
    return cached[0]


def unpack(wheel: Path, folder: Path, files: Collection[str]) -> Path:
    """Unpacks `files` (paths in the wheel) and the wheel's metadata, and returns `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = [name for name in archive.namelist() if name.split("/")[0].endswith(".dist-info")]
        archive.extractall(folder, [*files, *metadata])
    return folder
