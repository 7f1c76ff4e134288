"""Pins where SGLang's launcher does not arrange the processes: a server that is a child, a scheduler that is none."""

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


def found(*arguments: str, **environment: str) -> dict[str, Any]:
    variables = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pinning.arrangements", *arguments],
        cwd=ROOT,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.e2e
def test_a_server_in_a_child_process_takes_pins() -> None:
    (scheduler,) = found("server", str(tiny_model()), PREFIXPACK_PIN_BUDGET_PERCENT="50")["schedulers"]
    assert [pin["tokens"] for pin in scheduler["pins"]] == [40]
    assert scheduler["budget_tokens"] == 1024


def test_the_backends_factory_applies_every_hook_that_nobody_registered_and_none_twice() -> None:
    assert found("factory") == {"missing": [], "twice": []}
