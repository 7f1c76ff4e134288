"""The runner of GPU jobs, with jobs that need none."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.on_gpu import JOBS, Job, State, run_all


def test_what_is_missing_runs_and_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut-off job's processes end with it; the next call repeats neither what is done nor what does not fit."""
    sleep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(77.5)'])"
    jobs = [
        Job("good", 0.2, "-c \"open('{out}.txt', 'a').write('once')\""),
        Job("bad", 0.2, "-c \"import os, sys; sys.exit(int(os.environ['STATUS']))\"", (("STATUS", "5"),)),
        Job("too_long_to_start", 10, "-c pass"),
        Job("slow", 0.01, f'-c "{sleep}"'),
    ]
    assert run_all(jobs, tmp_path, None, minutes=1, state=State(tmp_path)) == 1
    assert not subprocess.run(["pgrep", "-f", "time.sleep(77.5)"], capture_output=True, check=False).stdout
    state = State(tmp_path)
    assert [state.status(job.name) for job in jobs] == ["done", "failed", "not started", "cut off"]
    assert "left: too_long_to_start, not started, 10 min" in capsys.readouterr().out
    jobs[1:] = [Job("bad", 0.2, "-c pass")]
    assert run_all(jobs, tmp_path, None, minutes=1, state=state) == 0
    assert (tmp_path / "good.txt").read_text() == "once"


def test_jobs_name_modules_and_files_that_exist() -> None:
    for job in JOBS:
        arguments = job.arguments(Path("out"), Path("a model"))
        assert arguments[0] == "-m"
        assert find_spec(arguments[1]), job.name
        assert all(Path(word).exists() for word in arguments if word.startswith("tests/")), job.name
        assert job.needs_model == ("a model" in arguments)
