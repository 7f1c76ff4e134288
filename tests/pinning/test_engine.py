"""Pins through `sglang.Engine`, without an HTTP server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_prefix_attn.demo.tiny_model import tiny_model

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def test_a_prefix_is_pinned_listed_and_released_once() -> None:
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "PREFIXPACK_PIN_BUDGET_PERCENT": "50",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.pinning.engine_pins", str(tiny_model())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["made"]["budget_tokens"] == 1024
    (pin,) = result["listed"]["pins"]
    assert (pin["label"], pin["tokens"], pin["cached_tokens"]) == ("system", 300, 300)
    assert result["released"]["released"] == [pin["id"]]
    assert result["again"] == "unknown"
