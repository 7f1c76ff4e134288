"""Steps of a server from its log: how long each took, with how many running requests, and whether it was broken up.

SGLang writes one line per prefill batch, and with `--decode-log-interval 1` one line per decode batch. With
`SGLANG_LOG_MS=1` lines carry milliseconds. The gap between two decode lines is the time of one decode step; a gap with
a prefill line in it also holds that prefill.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

LOG_ENVIRONMENT = {"SGLANG_LOG_MS": "1"}
LOG_ARGUMENTS = ("--decode-log-interval", "1")
BUCKET = 32  # running requests per row of the step-time table

_LINE = re.compile(
    r"^\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3})[^\]]*\] "
    r"(?P<kind>Decode|Prefill) batch.*?#running-req: (?P<running>\d+)(?:.*?accept len: (?P<accepted>[\d.]+))?"
)


@dataclass(frozen=True)
class LoggedStep:
    """A decode step.

    Attributes:
        end: seconds since the epoch, local clock of the server.
        seconds: since the decode step before it.
        running: requests that decoded.
        prefills: prefill batches between the two decode steps.
        accepted: tokens that a request got in this step, on average; 1 without speculation.
    """

    end: float
    seconds: float
    running: int
    prefills: int
    accepted: float = 1.0


def read_steps(lines: Iterable[str]) -> list[LoggedStep]:
    """Decode steps in the order of the log; the first decode line only starts the clock."""
    steps: list[LoggedStep] = []
    last: float | None = None
    prefills = 0
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        if match["kind"] == "Prefill":
            prefills += 1
            continue
        now = datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S.%f").timestamp()
        if last is not None:
            steps.append(LoggedStep(now, now - last, int(match["running"]), prefills, float(match["accepted"] or 1)))
        last, prefills = now, 0
    return steps


def summary(steps: Sequence[LoggedStep]) -> dict[str, object]:
    """Share of time in gaps with a prefill, tokens a request and step, median decode step (ms) by running requests."""
    total, requests = sum(step.seconds for step in steps), sum(step.running for step in steps)
    by_running: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if not step.prefills:
            by_running[step.running // BUCKET * BUCKET].append(step.seconds)
    return {
        "steps": len(steps),
        "steps_after_prefill": sum(step.prefills > 0 for step in steps),
        "share_of_time_with_prefill": sum(step.seconds for step in steps if step.prefills) / total if total else None,
        "accepted_tokens": sum(s.accepted * s.running for s in steps) / requests if requests else None,
        "decode_step_ms": {
            f"{low}-{low + BUCKET - 1}": round(1e3 * statistics.median(times), 3)
            for low, times in sorted(by_running.items())
        },
    }
