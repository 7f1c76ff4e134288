"""Jobs of `python -m benchmarks.on_gpu`: which run, on which GPUs, and what the next call does. No GPU is needed."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import DRAFT, JOBS, Job, State, make_draft, run_all, visible_gpus

ROOT = Path(__file__).parents[2]
HERE = "import os, pathlib, sys, time; here = pathlib.Path(sys.argv[1]).parent; "
NOTE = HERE + "(here / os.environ['NAME']).write_text(os.environ['CUDA_VISIBLE_DEVICES']); "


def job(name: str, program: str, minutes: float = 0.1, gpus: int = 1) -> Job:
    return Job(name, minutes, f"-c {shlex.quote(program)} {{out}}", (("NAME", name),), gpus)


def run(jobs: list[Job], out: Path, gpus: list[str], minutes: float = 1.0) -> tuple[int, State]:
    state = State(out)
    return run_all(jobs, out, None, minutes, state, gpus), state


def test_jobs_run_side_by_side_on_gpus_of_their_own(tmp_path: Path) -> None:
    meet = (
        NOTE
        + "end = time.monotonic() + 30\nwhile not (here / {other!r}).exists(): assert time.monotonic() < end, 'alone'"
    )
    jobs = [job("one", meet.format(other="two")), job("two", meet.format(other="one")), job("both", NOTE, gpus=2)]
    jobs.append(job("last", NOTE))
    status, state = run(jobs, tmp_path, ["2", "5"])
    assert status == 0, [path.read_text() for path in tmp_path.glob("*.log")]
    assert {(tmp_path / name).read_text() for name in ("one", "two")} == {"2", "5"}
    assert sorted((tmp_path / "both").read_text().split(",")) == ["2", "5"]
    assert {entry["gpus_in_use"] for entry in state.entries.values()} == {2}
    assert list(state.entries)[2:] == ["both", "last"]  # which waits for the two, and which does not overtake it


def test_the_next_call_runs_what_failed_or_was_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = HERE + "file = here / os.environ['NAME']; n = file.stat().st_size if file.exists() else 0; "
    count += "file.write_bytes(bytes(n + 1)); "
    jobs = [job("good", count), job("bad", count + "sys.exit(n == 0)"), job("long", count, minutes=5)]
    assert run(jobs, tmp_path, ["0"])[0] == 1
    assert "left: long, not started, 5 min" in capsys.readouterr().out
    assert run(jobs, tmp_path, ["0"])[0] == 3
    assert run(jobs, tmp_path, ["0"], minutes=6)[0] == 0
    assert {name: (tmp_path / name).stat().st_size for name in ("good", "bad", "long")} == {
        "good": 1, "bad": 2, "long": 1,
    }  # fmt: skip


def test_a_job_that_hangs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "OVERTIME", 1)
    status, state = run([job("hangs", "import time; time.sleep(60)", minutes=0.01)], tmp_path, ["0"])
    assert (status, state.status("hangs")) == (3, "cut off")
    assert state.entries["hangs"]["seconds"] < 30


def test_ctrl_c_ends_the_jobs(tmp_path: Path) -> None:
    program = f"""
import pathlib, sys
from tests.benchmarks.test_on_gpu import job, run
jobs = [job(name, "import time; time.sleep(300)", minutes=5) for name in ("one", "two")]
run(jobs, pathlib.Path({str(tmp_path)!r}), ["0", "1"], minutes=10)
"""
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert [process.stdout.readline().partition(":")[0] for _ in range(2)] == ["one", "two"]
        time.sleep(1)  # their processes start
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert time.monotonic() - started < 60
    assert json.loads((tmp_path / "jobs.json").read_text() if (tmp_path / "jobs.json").exists() else "{}") == {}


def test_the_draft_has_one_layer_and_the_models_tokenizer(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / DRAFT
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 32, "hidden_size": 8}))
    for name in ("tokenizer.json", "model.safetensors.index.json", "model.safetensors"):
        (model / name).write_text("{}")
    for file in model.iterdir():
        file.chmod(0o444)
    make_draft(model, draft)
    make_draft(model, draft)
    assert json.loads((draft / "config.json").read_text()) == {"num_hidden_layers": 1, "hidden_size": 8}
    assert sorted(path.name for path in draft.iterdir()) == ["config.json", "tokenizer.json"]


def test_gpus_are_those_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    assert visible_gpus() == ["3", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == [""]  # hidden ones stay hidden
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setattr(on_gpu.torch.cuda, "device_count", lambda: 0)
    assert visible_gpus() == ["0"]


@pytest.mark.parametrize("listed", JOBS, ids=lambda listed: listed.name)
def test_commands_name_their_results_and_files_that_exist(listed: Job, tmp_path: Path) -> None:
    arguments = listed.arguments(tmp_path, tmp_path / "model")
    assert "{" not in " ".join(arguments)
    assert (arguments[0], find_spec(arguments[1]) is not None) == ("-m", True)
    assert listed.needs_model == (str(tmp_path / "model") in arguments)
    for path in (argument for argument in arguments if argument.startswith("tests/")):
        assert (ROOT / path).exists(), path
