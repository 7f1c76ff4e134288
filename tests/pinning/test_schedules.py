"""Random schedules against SGLang's real caches: nothing hangs, nothing leaks, no lock is released twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.pinning import rank_recorder
from tests.pinning.random_schedule import run

ROOT = Path(__file__).resolve().parents[2]
QUICK, FULL, ALIKE = 30, 10_000, 12


def test_random_schedules() -> None:
    did = run(0, QUICK)
    for what in ("aborts", "flushes", "retractions", "pins refused", "pins shed", "requests of offline groups"):
        assert did[what] > 0, f"no schedule had {what}"


def test_two_processes_that_have_nothing_in_common_decide_alike(tmp_path: Path) -> None:
    processes = []
    for rank in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": str(1 + int(rank)), rank_recorder.FOLDER: str(tmp_path)}
        command = [sys.executable, "-m", "tests.pinning.rank_recorder", rank, str(ALIKE)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    assert [process.wait(240) for process in processes] == [0, 0]
    kinds = rank_recorder.assert_alike(*rank_recorder.events(tmp_path))
    every = {"pinned", "locked", "released", "expired", "shed", "cleared", "announced", "ahead", "evicted"}
    assert every <= kinds.keys()


@pytest.mark.slow
def test_ten_thousand_random_schedules() -> None:
    run(QUICK, FULL - QUICK)
