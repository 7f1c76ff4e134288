"""The stages of an environment: what each installs, and which of them a call has to run.

Standard library only, as in `setup_env`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

INSTALLER = Path(__file__).resolve().parent
ROOT = INSTALLER.parents[1]
TORCH_VERSION = "2.13.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_VARIABLES = ("PREFIXPACK_CUDA", "PREFIXPACK_CUDA_ARCHS", "CXX")
BUILD_TOOLS = ("setuptools>=77", "wheel", "pybind11>=2.12")
HEARTBEAT_SECONDS = 15.0
JOINS = "tools"  # the stage that waits for the one beside the others
ERROR_LINES, ERROR_COLUMNS = 25, 300


class SetupError(Exception):
    """The environment cannot be created; the message says what the user must change."""


@dataclasses.dataclass(frozen=True)
class Settings:
    venv: Path
    sglang: str
    gpu: bool
    list_only: bool = False
    torch_spec: str | None = dataclasses.field(default_factory=lambda: os.environ.get("TORCH_SPEC"))
    torch_index_url: str | None = dataclasses.field(default_factory=lambda: os.environ.get("TORCH_INDEX_URL"))

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of the installation.

    Attributes:
        name: key of its digest in the stamp file.
        inputs: everything that the result depends on.
        intact: whether the result still exists.
        beside: whether it runs beside the stages after it, up to the stage "tools". Downloads leave a core idle.
    """

    name: str
    title: str
    inputs: tuple[str, ...]
    action: Callable[[], None]
    intact: Callable[[], bool] = lambda: True
    beside: bool = False


def digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def file_digest(paths: Sequence[Path]) -> str:
    return digest([f"{path.relative_to(ROOT)}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths])


class Installer:
    """The stages of one environment."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.log = settings.venv / "setup.log"
        self.stamp_file = settings.venv / "setup-stamps.json"
        self._doing = threading.local()  # two stages may run at a time
        self.made_here = "venv" in self._read_stamps()

    def show_stages(self) -> None:
        """Prints the stages and which of them `run` would execute."""
        stages, stamps, chained, stale = self._stages(), self._read_stamps(), "", False
        for number, stage in enumerate(stages, start=1):
            chained = digest([chained, stage.name, *stage.inputs])
            stale = stale or stamps.get(stage.name) != chained or not stage.intact()
            print(f"{number}/{len(stages)} {stage.name:7} {'to do' if stale else 'done':6} {stage.title}")

    def run(self) -> None:
        """Executes every stage that is not up to date.

        Raises:
            SetupError: a command failed.
        """
        stages, stamps = self._stages(), self._read_stamps()
        chained, work_left = "", False
        with ThreadPoolExecutor(1) as pool:
            beside: Future[None] | None = None
            for number, stage in enumerate(stages, start=1):
                if beside is not None and stage.name == JOINS:
                    beside.result()
                chained = digest([chained, stage.name, *stage.inputs])
                if stamps.get(stage.name) == chained and stage.intact():
                    continue
                work_left = True
                for later in stages[number - 1 :]:
                    stamps.pop(later.name, None)
                self._write_stamps(stamps)
                work = functools.partial(self._execute, stage, stamps, chained, f"[setup {number}/{len(stages)}]")
                if stage.beside:
                    beside = pool.submit(work)
                else:
                    work()
        kind, state = "GPU" if self.settings.gpu else "CPU", "ready" if work_left else "up to date"
        print(f"[setup] {self.settings.venv} is {state}: sglang {self.settings.sglang}, {kind}", flush=True)

    def _execute(self, stage: Stage, stamps: dict[str, str], stamp: str, prefix: str) -> None:
        self._doing.stage = f"{prefix} {stage.title}"
        print(self._doing.stage, flush=True)
        started = time.monotonic()
        stage.action()
        stamps[stage.name] = stamp
        self._write_stamps(stamps)
        print(f"{prefix} done in {time.monotonic() - started:.0f} s", flush=True)

    def _stages(self) -> list[Stage]:
        settings = self.settings
        venv = Stage(
            "venv",
            f"virtual environment {settings.venv} with Python {platform.python_version()}",
            (sys.executable, sys.version, f"gpu={settings.gpu}"),
            self._make_venv,
            settings.python.exists,
        )
        sources = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
        build_inputs = file_digest([*sources, ROOT / "setup.py", ROOT / "pyproject.toml"])
        variables = {name: os.environ[name] for name in BUILD_VARIABLES if name in os.environ}
        if not settings.gpu:
            variables.setdefault("PREFIXPACK_CUDA", "0")
        build = Stage(
            "build",
            "building sgl-prefix-attn (C++, a minute or two)",
            (build_inputs, json.dumps(variables, sort_keys=True), shutil.which("nvcc") or ""),
            lambda: self._build(variables),
            lambda: any((ROOT / "sgl_prefix_attn").glob("_native*.so")),
            beside=True,
        )
        tools = Stage(JOINS, "test and lint tools", (), lambda: self._pip("sgl-prefix-attn[test,lint,plot]"))
        # The build needs the build tools, which the first stage of packages installs.
        first, *others = self._gpu_stages() if settings.gpu else self._cpu_stages()
        return [venv, first, build, *others, tools, self._check_stage()]

    def _check_stage(self) -> Stage:
        return Stage("check", "importing SGLang's server once", (), self._check_imports)

    def _gpu_stages(self) -> list[Stage]:
        spec = f"sglang=={self.settings.sglang}"
        torch_spec = (self.settings.torch_spec,) if self.settings.torch_spec else ()
        return [
            Stage(
                "sglang",
                f"{spec} for NVIDIA GPUs, with its own torch and kernels (several GB)",
                (spec, *torch_spec, *BUILD_TOOLS),
                lambda: self._pip(*BUILD_TOOLS, spec, *torch_spec, *self._torch_index()),
            )
        ]

    def _cpu_stages(self) -> list[Stage]:
        spec = f"sglang=={self.settings.sglang}"
        requirements = INSTALLER / "requirements-cpu.txt"
        no_deps = INSTALLER / "requirements-cpu-no-deps.txt"
        shims = INSTALLER / "sglang_cpu"
        shim_files = [path for path in sorted(shims.rglob("*")) if path.suffix in (".py", ".toml")]
        return [
            Stage(
                "torch",
                f"torch, CPU build (about 200 MB): {self.settings.torch_spec or TORCH_VERSION}",
                (str(self.settings.torch_spec), str(self.settings.torch_index_url), *BUILD_TOOLS),
                self._install_cpu_torch,
            ),
            Stage(
                "sglang",
                f"{spec} and what it imports on a CPU (about 1 GB)",
                (spec, requirements.read_text(), no_deps.read_text()),
                lambda: self._install_cpu_sglang(spec, requirements, no_deps),
            ),
            Stage(
                "shims",
                "CPU shims for sgl_kernel and torchvision",
                (file_digest(shim_files),),
                lambda: self._install_shims(shims),
            ),
        ]

    def _make_venv(self) -> None:
        # Only an environment that an earlier call created is cleared.
        clear = ["--clear"] if self.made_here else []
        try:
            self._command([sys.executable, "-m", "venv", *clear, str(self.settings.venv)])
        except SetupError as error:
            hint = "Is Python's venv module installed? (Debian and Ubuntu: apt install python3-venv)"
            raise SetupError(f"{error}\n{hint}") from error

    def _torch_index(self) -> list[str]:
        return ["--index-url", self.settings.torch_index_url] if self.settings.torch_index_url else []

    def _install_cpu_torch(self) -> None:
        self._pip(*BUILD_TOOLS)
        if self.settings.torch_spec or self.settings.torch_index_url:
            self._pip(self.settings.torch_spec or f"torch=={TORCH_VERSION}", *self._torch_index())
            return
        cpu_build = f"torch=={TORCH_VERSION}+cpu"
        for options in ([], ["--extra-index-url", PYTORCH_CPU_INDEX]):
            with contextlib.suppress(SetupError):
                return self._pip(cpu_build, *options)
        print(f"    no index offers {cpu_build}; taking the ordinary build, which may be large", flush=True)
        self._pip(f"torch=={TORCH_VERSION}")

    def _install_cpu_sglang(self, spec: str, requirements: Path, no_deps: Path) -> None:
        self._pip("-r", str(requirements))
        self._pip("--no-deps", "-r", str(no_deps))
        self._pip("--no-deps", spec)

    def _install_shims(self, shims: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch, shims.name)
            shutil.copytree(shims, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
            self._pip("--no-deps", "--no-build-isolation", "--force-reinstall", str(copy))

    def _build(self, variables: dict[str, str]) -> None:
        log = self.settings.venv / "build.log"
        self._pip("--no-deps", "--no-build-isolation", "-e", str(ROOT), environment=variables, log=log)

    def _check_imports(self) -> None:
        environment = {} if self.settings.gpu else {"SGLANG_USE_CPU_ENGINE": "1"}
        code = "import sgl_prefix_attn._native, sglang.srt.entrypoints.http_server"
        self._command([str(self.settings.python), "-c", code], environment=environment)

    def _pip(self, *arguments: str, environment: dict[str, str] | None = None, log: Path | None = None) -> None:
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        command = [str(self.settings.python), "-m", "pip", "install", *options, *arguments]
        self._command(command, environment=environment, log=log)

    def _command(
        self, command: list[str], *, environment: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Runs a command with its output in a log (None: the environment's); prints a line every few seconds."""
        log = log or self.log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a+b") as output:
            output.seek(0, os.SEEK_END)
            begin = output.tell()
            variables = {**os.environ, **(environment or {})}
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                status = self._wait(process)
            finally:
                process.kill()
                process.wait()
            if status == 0:
                return
            output.seek(begin)
            lines = output.read().decode(errors="replace").splitlines()
        tail = [textwrap.shorten(line, ERROR_COLUMNS, placeholder=" ...") for line in lines[-ERROR_LINES:]]
        failed = f"failed with status {status}: {' '.join(command)}"
        raise SetupError("\n".join([failed, *tail, f"whole output: {log}"]))

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        started = time.monotonic()
        while True:
            try:
                return process.wait(HEARTBEAT_SECONDS)
            except subprocess.TimeoutExpired:
                stage = getattr(self._doing, "stage", "[setup]")
                print(f"{stage}: still working ({time.monotonic() - started:.0f} s)", flush=True)

    def _read_stamps(self) -> dict[str, str]:
        try:
            return dict(json.loads(self.stamp_file.read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def _write_stamps(self, stamps: dict[str, str]) -> None:
        if self.settings.venv.exists():
            self.stamp_file.write_text(json.dumps(stamps, indent=1) + "\n")
