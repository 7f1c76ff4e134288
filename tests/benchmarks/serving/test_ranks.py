"""Totals of a server's ranks, and that ranks which counted something else are told from those that did not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.serving import __main__ as command
from benchmarks.serving import ranks as ranks_module
from tests.pinning.test_ranks import RANKS


@pytest.mark.e2e
@pytest.mark.slow
def test_two_ranks_of_the_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "WAIT_SECONDS", 120)
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "serving.json"
    status = command.main(
        ["--backends", "prefixpack", "--workload", "rl", "--groups", "3", "--samples", "4", "--prompt-tokens", "96",
         "--output-tokens", "12", "--tp", "2", "--start-seconds", "600", "--out", str(out),
         "--logs", str(tmp_path / "logs")]
    )  # fmt: skip
    assert status == 0, os.listdir(tmp_path / "logs")
    (run,) = json.loads(out.read_text())["runs"]
    assert run["ranks"]["alike"]
    first, second = run["ranks"]["totals"]["0"], run["ranks"]["totals"]["1"]
    assert first == second
    assert first["plans_made"] > 0
    assert first["packed_steps/decode"] > 5
    assert first["kv_tokens_read"] > 0
