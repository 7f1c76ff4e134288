"""The installer of a source checkout, and how setup.py finds nvcc."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.installer import cli, setup_env
from sgl_prefix_attn.installer.setup_env import Installer, SetupError
from sgl_prefix_attn.sglang_plugin.compat import versions

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an installer would run; there is no CPU build of torch."""
    made: list[str] = []

    def command(self: Installer, words: list[str], *_: Any, **__: Any) -> None:
        made.append(" ".join(words))
        if "+cpu" in made[-1]:
            raise SetupError("no such version")
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.touch()

    monkeypatch.setattr(Installer, "_command", command)
    return made


@pytest.mark.parametrize(("gpu", "first"), [("no", "torch=="), ("yes", "sglang==")])
def test_a_call_goes_on_where_the_last_one_ended(gpu, first, commands, tmp_path, capsys):
    words = ["--venv", str(tmp_path / "venv"), "--gpu", gpu]
    assert setup_env.main(words) == 0
    assert commands[0].endswith(f"-m venv {tmp_path / 'venv'}")
    assert first in next(command for command in commands if "==" in command)
    assert "sglang.srt.entrypoints.http_server" in commands[-1]
    assert ("taking the ordinary build" in capsys.readouterr().out) == (gpu == "no")
    commands.clear()
    assert setup_env.main(words) == 0
    assert commands == []
    assert "is up to date: sglang" in capsys.readouterr().out
    assert setup_env.main([*words, "--sglang", "0.5.21"]) == 0
    assert not any("-m venv" in command for command in commands)
    assert any("sglang==0.5.21" in command for command in commands)


def test_a_stage_that_failed_is_done_again_with_those_after_it(commands, tmp_path, monkeypatch):
    words, pip = ["--venv", str(tmp_path / "venv"), "--gpu", "no"], Installer._pip
    assert setup_env.main(words) == 0
    every = [command for command in commands if "+cpu" not in command]

    def fails(self: Installer, *arguments: str, **more: Any) -> None:
        if "--force-reinstall" in arguments:
            raise SetupError("no shims")
        pip(self, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Installer, "_pip", fails)
        assert setup_env.main([*words, "--sglang", "0.5.21"]) == 1
    commands.clear()
    assert setup_env.main([*words, "--sglang", "0.5.21"]) == 0
    assert [command.split()[-1].split("/")[-1] for command in commands] == [
        command.split()[-1].split("/")[-1] for command in every[-3:]
    ]


def test_a_command_that_fails_is_named_after_its_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-c", "exit(print('no such package') or 3)"]
    with pytest.raises(SetupError, match=r"failed with status 3: .*no such package"):
        Installer(tmp_path, "0.5.20", gpu=False)._command(words)
    assert capfd.readouterr().out == "no such package\n"


def test_a_python_with_nothing_installed_runs_it_from_anywhere(tmp_path: Path) -> None:
    script = ROOT / "sgl_prefix_attn" / "installer" / "setup_env.py"
    command = [sys.executable, "-I", "-S", str(script), "--list", "--gpu", "no", "--venv", "here"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"1/7 venv    to do  virtual environment {tmp_path / 'here'} with Python" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("here", "sglang", "message"),
    [
        ({"platform": "darwin"}, "0.5.20", "published for Linux on x86_64 and aarch64; this is darwin"),
        ({"version_info": (3, 14)}, "0.5.20", "sglang 0.5.20 needs Python 3.10 to 3.13, python is 3.14: "),
        ({"version_info": (3, 10)}, "0.5.22", "sglang 0.5.22 needs Python 3.11 to 3.13, python is 3.10: "),
        ({"compiler": "/no/c++"}, "0.5.20", "no C++ compiler '/no/c++'"),
    ],
)
def test_a_machine_that_cannot_do_is_told_what_to_change(here, sglang, message, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", here.get("compiler", "c++"))
    known = {"platform": "linux", "version_info": (3, 11), "executable": "python", **here}
    monkeypatch.setattr(setup_env, "sys", SimpleNamespace(**known))
    check = setup_env.check_compiler if "compiler" in here else lambda: setup_env.check_python(sglang, "")
    with pytest.raises(SetupError, match=re.escape(message)):
        check()


@pytest.mark.parametrize("version", ["0.5.99", "0.5.13", "0.6.0", "main", "0.5", "0.5.20 --pre"])
def test_another_sglang_is_refused_before_anything_is_done(version, commands, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PREFIXPACK_ALLOW_UNTESTED_SGLANG", raising=False)
    words = ["--venv", str(tmp_path / "venv"), "--gpu", "no", "--sglang", version]
    assert setup_env.main(words) == 1
    assert (
        f"error: sglang {version}: this package serves {versions.OLDEST} to {versions.NEWEST}; "
        in capsys.readouterr().err
    )
    assert (commands, list(tmp_path.iterdir())) == ([], [])
    monkeypatch.setenv("PREFIXPACK_ALLOW_UNTESTED_SGLANG", "1")
    assert setup_env.main(words) == 0


def test_the_range_is_the_plug_ins() -> None:
    for version, ours in ((versions.OLDEST, setup_env.OLDEST_SGLANG), (versions.NEWEST, setup_env.NEWEST_SGLANG)):
        assert version == ".".join(map(str, ours))
        setup_env.check_sglang(f"{version}.post1")


def test_a_folder_that_cannot_hold_an_environment_is_told(commands, tmp_path, monkeypatch, capsys):
    def error_of(venv: Path) -> str:
        assert setup_env.main(["--venv", str(venv), "--gpu", "no"]) == 1
        return capsys.readouterr().err

    (tmp_path / "file").touch()
    told = "; name another folder (make: VENV=FOLDER)\n"
    assert error_of(Path("/proc/x")) == f"[setup] error: /proc/x: no such place can be made{told}"
    assert error_of(tmp_path / "file") == f"[setup] error: {tmp_path / 'file'} is a file{told}"
    assert error_of(tmp_path / "file" / "x") == f"[setup] error: {tmp_path / 'file' / 'x'}: Not a directory{told}"
    with monkeypatch.context() as patched:
        patched.setattr(setup_env.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
        assert "has 1.0 GB left on its disk, and the environment takes about " in error_of(tmp_path / "venv")

    def refused(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(setup_env.tempfile, "TemporaryFile", refused)
    assert error_of(tmp_path / "venv") == f"[setup] error: {tmp_path / 'venv'}: Permission denied{told}"
    assert commands == []


def test_a_disk_that_becomes_full_is_told(commands, tmp_path, monkeypatch, capsys):
    def full(self: Installer) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Installer, "_write", full)
    assert setup_env.main(["--venv", str(tmp_path), "--gpu", "no"]) == 1
    assert capsys.readouterr().err == f"[setup] error: {tmp_path}: No space left on device\n"


@pytest.mark.parametrize(
    ("target", "status", "says"),
    [
        ("tests", 0, "pytest"),
        ("benchmarks", 0, "kernel/plan_time"),
        ("tset", 2, "make: there is no target tset; did you mean test? (make help lists them)"),
        ("examples", 2, "make: there is no target examples (make help lists them)"),
        ("xyz", 2, "make: there is no target xyz (make help lists them)"),
    ],
)
def test_a_target_that_is_none_is_told(target: str, status: int, says: str) -> None:
    words = ["make", *(["-n"] if status == 0 else []), f"PYTHON={sys.executable}", target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, says in done.stdout + done.stderr) == (status, True)


def test_one_setup_waits_for_another_and_no_shared_folder_is_used(commands, tmp_path, monkeypatch, capsys):
    """A lock file in a shared folder can be a link of another user's, through which a file of ours is emptied."""
    venv, shared, waits = tmp_path / "venv", tmp_path / "shared", threading.Event()
    venv.mkdir()
    shared.mkdir()
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(setup_env.tempfile, "tempdir", None)
    monkeypatch.setattr("builtins.print", lambda text, **_: waits.set() if "another setup" in text else None)

    def second() -> None:
        with setup_env.only_one(venv):
            entered.append("second")

    entered: list[str] = []
    other = threading.Thread(target=second)
    with setup_env.only_one(venv):
        other.start()
        assert waits.wait(60)
        entered.append("first")
    other.join(60)
    assert entered == ["first", "second"]
    assert list(shared.iterdir()) == list(venv.iterdir()) == []


def test_the_wheel_takes_the_shims_as_data(setup_names: dict[str, Any]) -> None:
    packages = setup_names["python_packages"]()
    assert {"sgl_prefix_attn.routing", "sgl_prefix_attn.installer"} <= set(packages)
    assert not [name for name in packages if "sgl_kernel" in name]


def test_setup_cpu_leaves_environments_of_others_alone(monkeypatch, tmp_path, capsys):
    """It installs into an environment of its own only; nothing runs here."""
    monkeypatch.setattr(cli.HereInstaller, "run", lambda self: print("installs"))
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert main(["setup-cpu"]) == 1
    assert "is not in a virtual environment; make one of its own" in capsys.readouterr().err
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert main(["setup-cpu"]) == 1  # torch and sglang are on this process's path
    assert re.search(r"has (sglang|torch) \S+, which the CPU build would replace", capsys.readouterr().err)
    (tmp_path / "setup-stamps.json").write_text("{}")  # an interrupted call
    assert main(["setup-cpu"]) == 0
    assert capsys.readouterr().out == "installs\n"
    assert main(["setup-cpu", "--sglang", "0.5.22"]) == (0 if sys.version_info >= (3, 11) else 1)


@pytest.fixture
def setup_names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of setup.py."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    return runpy.run_path(str(ROOT / "setup.py"))


class TestNvcc:
    @pytest.fixture
    def find(self, setup_names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str | None]:
        monkeypatch.setenv("PREFIXPACK_CUDA", "auto")
        return setup_names["find_nvcc"]

    @staticmethod
    def compiler(folder: Path) -> Path:
        path = folder / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    def test_a_stale_cuda_home_does_not_hide_the_one_on_path(self, find, tmp_path, monkeypatch, capsys):
        on_path = self.compiler(tmp_path / "cuda-13")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-12"))
        monkeypatch.setenv("PATH", str(on_path.parent))
        assert find() == str(on_path)
        assert f"no nvcc in CUDA_HOME={tmp_path / 'cuda-12'}/bin" in capsys.readouterr().err

    def test_none_at_all_is_an_error_only_if_it_is_asked_for(self, find, tmp_path, monkeypatch):
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find() is None
        monkeypatch.setenv("PREFIXPACK_CUDA", "1")
        with pytest.raises(SystemExit, match="nvcc is neither in CUDA_HOME/bin nor on PATH"):
            find()
