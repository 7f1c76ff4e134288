"""Random schedules against SGLang's real caches: nothing hangs, nothing leaks, no lock is released twice."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from tests.pinning.random_schedule import run

QUICK, FULL = 150, 10_000


def test_random_schedules() -> None:
    did = run(0, QUICK)
    for what in ("aborts", "flushes", "retractions", "pins refused", "pins shed", "requests of offline groups"):
        assert did[what] > 0, f"no schedule had {what}"


@pytest.mark.slow
def test_ten_thousand_random_schedules() -> None:
    run(QUICK, FULL - QUICK)
