#!/usr/bin/env python3
"""Creates a virtual environment with SGLang and this package, from a source checkout.

    python3 sgl_prefix_attn/installer/setup_env.py [--venv .venv] [--sglang 0.5.20] [--gpu auto|yes|no] [--list]

Runs with the system's Python and imports the standard library only. Needs Linux, Python 3.10 to 3.13 with its venv
module and headers, and a C++17 compiler. A file in the environment has what each finished stage was made from; a stage
that would be made from the same is skipped. With an NVIDIA GPU it installs sglang with the torch and kernels that
sglang requires; the authors have not run that path.

Environment variables:
    TORCH_SPEC       pip requirement for torch (default: the CPU build of torch 2.13.0)
    TORCH_INDEX_URL  package index of torch (default: pip's own indexes, then PyTorch's CPU index)
    PIP_*            pip's own settings, for example PIP_INDEX_URL
    PREFIXPACK_CUDA, PREFIXPACK_CUDA_ARCHS, CXX   passed to the build; without a GPU the CUDA part is built only if
                     PREFIXPACK_CUDA=1 or auto
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

INSTALLER = Path(__file__).resolve().parent
ROOT = INSTALLER.parents[1]
DEFAULT_SGLANG = "0.5.20"
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
OLDEST_SGLANG, NEWEST_SGLANG = (0, 5, 14), (0, 5, 23)  # as compat/versions.py has them
SGLANG_NEEDS_PYTHON_311 = (0, 5, 22)
LEAST_FREE_GB = {False: 4, True: 20}  # by GPU
TORCH = "torch==2.13.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TOOLS = ("setuptools>=77", "wheel", "pybind11>=2.12")
ANOTHER_FOLDER = "name another folder (make: VENV=FOLDER)"


class SetupError(Exception):
    """The environment cannot be created; the message says what the user must change."""


class Stage(NamedTuple):
    """One step of the installation. made_from: everything that its result depends on."""

    name: str
    title: str
    made_from: Sequence[str | None]
    action: Callable[[], None]


class Installer:
    """The stages of one environment.

    Args:
        gpu: for NVIDIA GPUs, else the CPU builds.
    """

    def __init__(self, venv: Path, sglang: str, *, gpu: bool) -> None:
        self.venv, self.sglang, self.gpu = venv, sglang, gpu
        self.python = venv / "bin" / "python"
        self.finished = venv / "setup-stamps.json"  # by name, a digest of what the stage was made from
        self._made_from: dict[str, str] = {}
        with suppress(FileNotFoundError, ValueError):
            self._made_from = dict(json.loads(self.finished.read_text()))
        self._made_here = "venv" in self._made_from
        if not self.python.exists():
            self._made_from.clear()
        if not any((ROOT / "sgl_prefix_attn").glob("_native*.so")):
            self._made_from.pop("build", None)

    def stages(self) -> list[Stage]:
        """All stages, in their order. The build needs the tools that the first stage of packages installs."""
        version = f"virtual environment {self.venv} with Python {platform.python_version()}"
        venv = Stage("venv", version, (sys.executable, sys.version, str(self.gpu)), self._make_venv)
        names = ("PREFIXPACK_CUDA", "PREFIXPACK_CUDA_ARCHS", "CXX")
        variables = {name: os.environ[name] for name in names if name in os.environ}
        if not self.gpu:
            variables.setdefault("PREFIXPACK_CUDA", "0")
        sources = _contents([*(ROOT / "csrc").rglob("*"), ROOT / "setup.py", ROOT / "pyproject.toml"])
        made_from = (*sources, json.dumps(variables), shutil.which("nvcc"))
        title, here = "building sgl-prefix-attn (C++, a minute or two)", ("--no-build-isolation", "-e", str(ROOT))
        build = Stage("build", title, made_from, lambda: self._pip("--no-deps", *here, variables=variables))
        ours = ("sgl-prefix-attn[test,lint,plot]",)
        tools = Stage("tools", "test and lint tools", ours, lambda: self._pip(*ours))
        first, *others = self.gpu_stages() if self.gpu else self.cpu_stages()
        return [venv, first, build, *others, tools, self.check_stage()]

    def check_stage(self) -> Stage:
        variables = {} if self.gpu else {"SGLANG_USE_CPU_ENGINE": "1"}
        code = "import sgl_prefix_attn._native, sglang.srt.entrypoints.http_server"
        words = (str(self.python), "-W", "ignore", "-c", code)
        return Stage("check", "importing SGLang's server once", words, lambda: self._command(words, variables))

    def gpu_stages(self) -> list[Stage]:
        words = (*BUILD_TOOLS, f"sglang=={self.sglang}", *_torch(), *_torch_index())
        title = f"sglang=={self.sglang} for NVIDIA GPUs, with its own torch and kernels (several GB)"
        return [Stage("sglang", title, words, lambda: self._pip(*words))]

    def cpu_stages(self) -> list[Stage]:
        spec, shims = f"sglang=={self.sglang}", INSTALLER / "sglang_cpu"
        files = [str(INSTALLER / name) for name in ("requirements-cpu.txt", "requirements-cpu-no-deps.txt")]

        def install() -> None:
            self._pip("-r", files[0])
            self._pip("--no-deps", "-r", files[1], spec)

        def install_shims() -> None:
            with tempfile.TemporaryDirectory() as scratch:
                left_out = shutil.ignore_patterns("build", "*.egg-info")
                copy = shutil.copytree(shims, Path(scratch, shims.name), ignore=left_out)
                self._pip("--no-deps", "--no-build-isolation", "--force-reinstall", str(copy))

        title = f"torch, CPU build (about 200 MB): {(_torch() or [TORCH])[0]}"
        texts = [Path(name).read_text() for name in files]
        shim_files = _contents(path for path in shims.rglob("*") if path.suffix in (".py", ".toml"))
        return [
            Stage("torch", title, (*_torch(), *_torch_index(), *BUILD_TOOLS), self._install_cpu_torch),
            Stage("sglang", f"{spec} and what it imports on a CPU (about 1 GB)", (spec, *texts), install),
            Stage("shims", "CPU shims for sgl_kernel and torchvision", shim_files, install_shims),
        ]

    def run(self, list_only: bool = False) -> None:
        """Executes the stages from the first one on that is not up to date, or lists them.

        Raises:
            SetupError: a command failed.
        """
        stages, digests, chained = self.stages(), list[str](), ""
        for stage in stages:
            chained = hashlib.sha256("\0".join(map(str, (chained, *stage.made_from))).encode()).hexdigest()
            digests.append(chained)
        names = [stage.name for stage in stages]
        done = next((i for i, name in enumerate(names) if self._made_from.get(name) != digests[i]), len(names))
        if list_only:
            for i, stage in enumerate(stages):
                print(f"{i + 1}/{len(stages)} {stage.name:7} {'to do' if i >= done else 'done':6} {stage.title}")
            return
        for name in names[done:]:
            self._made_from.pop(name, None)
        with ThreadPoolExecutor(1) as pool:  # the build runs beside downloads, which leave a core idle
            build: Future[None] | None = None
            for i, stage in enumerate(stages[done:], start=done):
                work = (stage, digests[i], f"[setup {i + 1}/{len(stages)}]")
                if stage.name == "build":
                    build = pool.submit(self._execute, *work)
                    continue
                if stage.name == "tools" and build is not None:
                    build.result()
                self._execute(*work)
        kind, state = "GPU" if self.gpu else "CPU", "up to date" if done == len(names) else "ready"
        print(f"[setup] {self.venv} is {state}: sglang {self.sglang}, {kind}", flush=True)

    def _execute(self, stage: Stage, digest: str, prefix: str) -> None:
        print(f"{prefix} {stage.title}\n", end="", flush=True)  # two stages may run at a time
        started = time.monotonic()
        self._write()
        stage.action()
        self._made_from[stage.name] = digest
        self._write()
        print(f"{prefix} done in {time.monotonic() - started:.0f} s\n", end="", flush=True)

    def _write(self) -> None:
        self.finished.write_text(json.dumps(dict(self._made_from), indent=1) + "\n")

    def _make_venv(self) -> None:
        clear = ["--clear"] if self._made_here else []  # what others have put there is kept
        try:
            self._command((sys.executable, "-m", "venv", *clear, str(self.venv)))
        except SetupError as error:
            hint = "Is Python's venv module installed? (Debian and Ubuntu: apt install python3-venv)"
            raise SetupError(f"{error}\n{hint}") from error

    def _install_cpu_torch(self) -> None:
        self._pip(*BUILD_TOOLS)
        if _torch() or _torch_index():
            return self._pip(*(_torch() or [TORCH]), *_torch_index())
        for options in ([], ["--extra-index-url", PYTORCH_CPU_INDEX]):
            with suppress(SetupError):
                return self._pip(f"{TORCH}+cpu", *options, errors=subprocess.DEVNULL)
        print(f"    no index offers {TORCH}+cpu; taking the ordinary build, which may be large", flush=True)
        return self._pip(TORCH)

    def _pip(self, *words: str, variables: Mapping[str, str] = {}, errors: int | None = None) -> None:
        options = ("-qq", "--disable-pip-version-check", "--no-input")
        self._command((str(self.python), "-m", "pip", "install", *options, *words), variables, errors)

    def _command(self, words: Sequence[str], variables: Mapping[str, str] = {}, errors: int | None = None) -> None:
        """Runs a command. Its output, as a compiler's errors, is for the user. errors: where they go instead."""
        environment = {**os.environ, **variables}
        done = subprocess.run(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stderr=errors, check=False)
        if done.returncode:
            raise SetupError(f"failed with status {done.returncode}: {' '.join(words)}")


def _torch() -> list[str]:
    return [os.environ["TORCH_SPEC"]] if os.environ.get("TORCH_SPEC") else []


def _torch_index() -> list[str]:
    return ["--index-url", os.environ["TORCH_INDEX_URL"]] if os.environ.get("TORCH_INDEX_URL") else []


def _contents(paths: Iterable[Path]) -> list[str]:
    """Names and contents of files."""
    found = [path for path in sorted(paths) if path.is_file()]
    return [f"{path.relative_to(ROOT)}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in found]


def has_nvidia_gpu() -> bool:
    """Whether nvidia-smi exists and lists a device."""
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def check_sglang(sglang: str) -> None:
    """Raises SetupError for a version that this package does not serve, before anything is downloaded."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?", sglang)
    if os.environ.get("PREFIXPACK_ALLOW_UNTESTED_SGLANG", "").lower() in ("1", "true", "yes", "on"):
        return
    if found is None or not OLDEST_SGLANG <= tuple(map(int, found.groups()[:3])) <= NEWEST_SGLANG:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_SGLANG, NEWEST_SGLANG))
        raise SetupError(
            f"sglang {sglang}: this package serves {oldest} to {newest}; PREFIXPACK_ALLOW_UNTESTED_SGLANG=1 tries "
            "another one"
        )


def check_python(sglang: str, remedy: str) -> None:
    """Raises SetupError where SGLang has no packages; `remedy` stands before the name of another Python."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        here = f"{sys.platform} on {platform.machine()}"
        raise SetupError(f"SGLang is published for Linux on x86_64 and aarch64; this is {here}")
    version, wanted = sys.version_info[:2], tuple(int(p) for p in sglang.split(".")[:3] if p.isdigit())
    oldest = (3, 11) if wanted >= SGLANG_NEEDS_PYTHON_311 else OLDEST_PYTHON
    if not oldest <= version <= NEWEST_PYTHON:
        names = [f"python3.{minor}" for minor in range(NEWEST_PYTHON[1], oldest[1] - 1, -1)]
        found = next(filter(shutil.which, names), None)
        advice = f"{remedy}{found}" if found else f"install one of {', '.join(names)}, then {remedy}..."
        raise SetupError(
            f"sglang {sglang} needs Python {oldest[0]}.{oldest[1]} to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}, "
            f"{sys.executable} is {version[0]}.{version[1]}: {advice}"
        )


def check_compiler() -> None:
    """Raises SetupError where the build lacks something."""
    headers, compiler = Path(sysconfig.get_path("include"), "Python.h"), os.environ.get("CXX", "c++").split()[0]
    if not headers.exists():
        raise SetupError(f"{headers} is missing: install Python's headers (Debian and Ubuntu: apt install python3-dev)")
    if shutil.which(compiler) is None:
        raise SetupError(f"no C++ compiler {compiler!r}: install one (Debian and Ubuntu: apt install g++) or set CXX")


def check_folder(venv: Path, gpu: bool) -> None:
    """Raises SetupError where no environment can be made, or where the disk is too full for a new one."""
    if venv.exists() and not venv.is_dir():
        raise SetupError(f"{venv} is a file; {ANOTHER_FOLDER}")
    try:
        venv.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=venv):
            pass
        free = shutil.disk_usage(venv).free / 1e9
    except OSError as error:
        reason = "no such place can be made" if error.errno == errno.ENOENT else error.strerror
        raise SetupError(f"{venv}: {reason}; {ANOTHER_FOLDER}") from error
    if not (venv / "bin" / "python").exists() and free < LEAST_FREE_GB[gpu]:
        raise SetupError(
            f"{venv} has {free:.1f} GB left on its disk, and the environment takes about {LEAST_FREE_GB[gpu]} GB; "
            f"make room or {ANOTHER_FOLDER}"
        )


@contextmanager
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--sglang", default=DEFAULT_SGLANG, help=f"version to install (default: {DEFAULT_SGLANG})")
    parser.add_argument(
        "--gpu", choices=("auto", "yes", "no"), default="auto", help="default: yes if nvidia-smi lists a GPU"
    )
    parser.add_argument("--list", action="store_true", help="list the stages and change nothing")
    args = parser.parse_args(arguments)
    venv, gpu = args.venv.absolute(), has_nvidia_gpu() if args.gpu == "auto" else args.gpu == "yes"
    try:
        if args.list:
            Installer(venv, args.sglang, gpu=gpu).run(list_only=True)
            return 0
        check_sglang(args.sglang)
        check_python(args.sglang, "run make with PYTHON=")
        check_compiler()
        check_folder(venv, gpu)
        with only_one(venv):
            Installer(venv, args.sglang, gpu=gpu).run()
    except SetupError as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # as a disk that has become full
        print(f"[setup] error: {error.filename or venv}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; the next call goes on with the unfinished stage", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
