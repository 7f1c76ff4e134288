"""Pins where SGLang's launcher does not arrange the processes: an engine, an actor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.demo.server import ServerOptions, Starter, log_tail, start_process, stop
from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.support import forked_server

COMMAND = [sys.executable, "-m", "tests.pinning.arrangements"]
OURS = {"PREFIXPACK_PIN_BUDGET_PERCENT": "50", "PREFIXPACK_RETENTION": "reuse", "PREFIXPACK_WRAP": "1"}


def printed(start: Starter, log: Path, *arguments: str) -> dict[str, Any]:
    """What the process prints in the end."""
    environment = {**ServerOptions("", None).full_environment(), **OURS}
    with log.open("wb") as output:
        process = start([*COMMAND, *arguments], environment, output)
    try:
        process.wait(300)
    finally:
        stop(process)
    results = [line for line in log.read_text().splitlines() if line.startswith("{")]
    assert results, log_tail(log)
    return dict(json.loads(results[-1]))


@pytest.mark.e2e
@pytest.mark.parametrize("start", [pytest.param(start_process, marks=pytest.mark.slow), forked_server.start])
def test_a_wrapped_engine_pins_lists_and_releases_a_prefix_once(start: Starter, tmp_path: Path) -> None:
    result = printed(start, tmp_path / "log", "engine", str(tiny_model()))
    assert result["made"]["budget_tokens"] == 1024
    (pin,) = result["listed"]["pins"]
    assert (pin["label"], pin["tokens"], pin["cached_tokens"]) == ("system", 300, 300)
    assert result["released"]["released"] == [pin["id"]]
    assert result["again"] == "unknown"
    assert result["wrapped"] == ["torch_native"]
    assert result["packed"]["steps_packed"]["decode"] > 0
    ((listed,), (released,)) = result["documented"]  # the snippet of docs/pinning.md
    assert [pin["label"] for pin in listed["pins"]] == ["system prompt"]
    assert released["released"] == [listed["pins"][0]["id"]]


def test_the_backends_factory_applies_every_hook_that_nobody_registered_and_none_twice(tmp_path: Path) -> None:
    found = printed(forked_server.start, tmp_path / "log", "factory")
    assert found == {"missing": [], "several_around": [], "twice": []}
