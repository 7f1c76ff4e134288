"""When the live tests of a benchmark begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import live_abtest
from sgl_prefix_attn.demo.server import ServerError

FACTS = {"gpu": "NVIDIA H200"}
NONE = {"packed": 0, "stock": 0}


def waits(monkeypatch: pytest.MonkeyPatch, *states: dict[str, Any] | None) -> int:
    """How many states, a second apart, are read until the tests begin."""
    times, read = iter(range(1000)), list[dict[str, Any] | None]()

    def packing_state() -> dict[str, Any] | None:
        read.append(states[min(len(read), len(states) - 1)])
        return read[-1]

    monkeypatch.setattr(live_abtest.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(live_abtest.time, "sleep", lambda seconds: None)
    server: Any = SimpleNamespace(packing_state=packing_state)
    live_abtest._wait_for_steps(server)
    return len(read)


def state(decode: int = 0, facts: dict[str, str] | None = FACTS, **routed: int) -> dict[str, Any]:
    counters = {"steps_packed": {"decode": decode}, "routed_steps": {**NONE, **routed}, "fallbacks": {"graph": 7}}
    return {"route": {"facts": facts}, "counters": counters}


@pytest.mark.parametrize("ready", [state(decode=1), state(packed=1), state(stock=1)])
def test_they_wait_for_a_step_that_could_run_packed(ready: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(monkeypatch, None, state(), {**ready, "route": {"facts": None}}, ready) == 4


def test_why_no_step_could_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for last, fallbacks in ((state(), r"\{'graph': 7\}"), (None, r"\{\}")):
        with pytest.raises(ServerError, match=f"no decode step could run packed within 600 s; fallbacks: {fallbacks}"):
            waits(monkeypatch, last)
