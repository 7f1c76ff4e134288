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

from sgl_prefix_attn.demo.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def found(*arguments: str) -> dict[str, Any]:
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.pinning.arrangements", *arguments]
    ours = {"PREFIXPACK_PIN_BUDGET_PERCENT": "50", "PREFIXPACK_RETENTION": "reuse", "PREFIXPACK_WRAP": "1"}
    environment = {**os.environ, **variables, **ours}
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


def test_the_backends_factory_applies_every_hook_that_nobody_registered_and_none_twice() -> None:
    assert found("factory") == {"missing": [], "twice": []}
