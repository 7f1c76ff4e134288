"""Pins where SGLang's launcher does not arrange the processes: an engine, an actor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.demo.server import ServerOptions
from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.support import forked_server

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.pinning.arrangements"]
OURS = {"PREFIXPACK_PIN_BUDGET_PERCENT": "50", "PREFIXPACK_RETENTION": "reuse", "PREFIXPACK_WRAP": "1"}


def found(*arguments: str) -> dict[str, Any]:
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*COMMAND, *arguments]
    environment = {**os.environ, **variables, **OURS}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.e2e
def test_a_wrapped_engine_pins_lists_and_releases_a_prefix_once() -> None:
    result = found("engine", str(tiny_model()))
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
    log = tmp_path / "log"
    with log.open("wb") as output:
        environment = {**ServerOptions("", None).full_environment(), **OURS}
        forked_server.start([*COMMAND, "factory"], environment, output).wait(300)
    assert json.loads(log.read_text().strip().splitlines()[-1]) == {
        "missing": [], "several_around": [], "twice": []
    }  # fmt: skip
