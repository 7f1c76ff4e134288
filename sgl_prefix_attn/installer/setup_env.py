#!/usr/bin/env python3
"""Creates a virtual environment with SGLang and this package, from a source checkout.

    python3 sgl_prefix_attn/installer/setup_env.py [--venv .venv] [--sglang 0.5.20] [--gpu auto|yes|no] [--list]

Runs with the system's Python and imports the standard library only. Needs Linux, Python 3.10 to 3.13 with its venv
module and headers, and a C++17 compiler. Each stage writes a digest of its inputs into the environment; a stage with
an unchanged digest is skipped. With an NVIDIA GPU it installs sglang with the torch and kernels that sglang requires;
the authors have not run that path.

Environment variables:
    TORCH_SPEC       pip requirement for torch (default: the CPU build of torch 2.13.0)
    TORCH_INDEX_URL  package index of torch (default: pip's own indexes, then PyTorch's CPU index)
    PIP_*            pip's own settings, for example PIP_INDEX_URL
    PREFIXPACK_CUDA, PREFIXPACK_CUDA_ARCHS, CXX   passed to the build; without a GPU the CUDA part is built only if
                     PREFIXPACK_CUDA=1 or auto
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":  # the package's own __init__ imports what is not installed yet
    package = types.ModuleType("sgl_prefix_attn")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["sgl_prefix_attn"] = package

from sgl_prefix_attn.installer.stages import ROOT, Installer, Settings, SetupError

DEFAULT_SGLANG = "0.5.20"
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
OLDEST_SGLANG, NEWEST_SGLANG = (0, 5, 14), (0, 5, 23)  # as compat/versions.py has them
SGLANG_NEEDS_PYTHON_311 = (0, 5, 22)
LEAST_FREE_GB = {False: 4, True: 20}  # by GPU


def has_nvidia_gpu() -> bool:
    """Whether nvidia-smi exists and lists a device."""
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def check_sglang(settings: Settings) -> None:
    """Raises SetupError for a version that this package does not serve, before anything is downloaded."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?", settings.sglang)
    if os.environ.get("PREFIXPACK_ALLOW_UNTESTED_SGLANG", "").lower() in ("1", "true", "yes", "on"):
        return
    if found is None or not OLDEST_SGLANG <= tuple(map(int, found.groups()[:3])) <= NEWEST_SGLANG:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_SGLANG, NEWEST_SGLANG))
        raise SetupError(
            f"sglang {settings.sglang}: this package serves {oldest} to {newest}; "
            "PREFIXPACK_ALLOW_UNTESTED_SGLANG=1 tries another one"
        )


def check_folder(settings: Settings) -> None:
    """Raises SetupError where no environment can be made, or where the disk is too full for a new one."""
    venv = settings.venv
    if venv.exists() and not venv.is_dir():
        raise SetupError(f"{venv} is a file; name another folder (make: VENV=FOLDER)")
    try:
        venv.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=venv):
            pass
        free = shutil.disk_usage(venv).free / 1e9
    except OSError as error:
        reason = "no such place can be made" if error.errno == errno.ENOENT else error.strerror
        raise SetupError(f"{venv}: {reason}; name another folder (make: VENV=FOLDER)") from error
    if not settings.python.exists() and free < LEAST_FREE_GB[settings.gpu]:
        raise SetupError(
            f"{venv} has {free:.1f} GB left on its disk, and the environment takes about "
            f"{LEAST_FREE_GB[settings.gpu]} GB; make room or name another folder (make: VENV=FOLDER)"
        )


def check_machine(settings: Settings) -> None:
    check_sglang(settings)
    check_python(settings, "run make with PYTHON=")
    headers, compiler = Path(sysconfig.get_path("include"), "Python.h"), os.environ.get("CXX", "c++").split()[0]
    if not headers.exists():
        raise SetupError(f"{headers} is missing: install Python's headers (Debian and Ubuntu: apt install python3-dev)")
    if shutil.which(compiler) is None:
        raise SetupError(f"no C++ compiler {compiler!r}: install one (Debian and Ubuntu: apt install g++) or set CXX")


def check_python(settings: Settings, remedy: str) -> None:
    """Raises SetupError where SGLang has no packages; `remedy` stands before the name of another Python."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        here = f"{sys.platform} on {platform.machine()}"
        raise SetupError(f"SGLang is published for Linux on x86_64 and aarch64; this is {here}")
    version, wanted = sys.version_info[:2], tuple(int(p) for p in settings.sglang.split(".")[:3] if p.isdigit())
    oldest = (3, 11) if wanted >= SGLANG_NEEDS_PYTHON_311 else OLDEST_PYTHON
    if not oldest <= version <= NEWEST_PYTHON:
        names = [f"python3.{minor}" for minor in range(NEWEST_PYTHON[1], oldest[1] - 1, -1)]
        found = [name for name in names if shutil.which(name)]
        advice = f"{remedy}{found[0]}" if found else f"install one of {', '.join(names)}, then {remedy}..."
        raise SetupError(
            f"sglang {settings.sglang} needs Python {oldest[0]}.{oldest[1]} to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}, "
            f"{sys.executable} is {version[0]}.{version[1]}: {advice}"
        )


@contextlib.contextmanager
def only_one(venv: Path) -> Iterator[None]:
    """Holds a lock against a second setup of the same environment."""
    # The folder itself: a lock file in a folder that all users share could be someone's link.
    handle = os.open(venv, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"[setup] another setup of {venv} is running; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # as on NFS, which locks only what is open for writing
            print(f"[setup] cannot lock {venv} ({error.strerror}): run no second setup of it", flush=True)
        yield
    finally:
        os.close(handle)


def parse(arguments: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--sglang", default=DEFAULT_SGLANG, help=f"version to install (default: {DEFAULT_SGLANG})")
    parser.add_argument(
        "--gpu", choices=("auto", "yes", "no"), default="auto", help="default: yes if nvidia-smi lists a GPU"
    )
    parser.add_argument("--list", action="store_true", help="list the stages and change nothing")
    chosen = parser.parse_args(arguments)
    return Settings(
        venv=chosen.venv.absolute(),
        sglang=chosen.sglang,
        list_only=chosen.list,
        gpu=has_nvidia_gpu() if chosen.gpu == "auto" else chosen.gpu == "yes",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    try:
        if settings.list_only:
            Installer(settings).show_stages()
            return 0
        check_machine(settings)
        check_folder(settings)
        with only_one(settings.venv):
            Installer(settings).run()
    except SetupError as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # as a disk that has become full
        print(f"[setup] error: {error.filename or settings.venv}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; the next call goes on with the unfinished stage", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
