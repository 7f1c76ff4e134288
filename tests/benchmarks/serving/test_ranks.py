"""Totals of a server's ranks, and that ranks which counted something else are told from those that did not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.serving import __main__ as command
from benchmarks.serving import ranks as ranks_module
from benchmarks.serving.ranks import Ranks, ranks_in
from tests.pinning.test_ranks import RANKS


def metrics(*reads_by_rank: int, packed: int = 7) -> str:
    """What a server with so many ranks exports, in part."""
    lines = ["# TYPE sglang:num_running_reqs gauge", 'sglang:num_running_reqs{tp_rank="0"} 3.0']
    lines += ["# TYPE sglang:prefixpack_of_all_ranks_total counter", "sglang:prefixpack_of_all_ranks_total 3.0"]
    for name, values in (
        ("kv_tokens_read", reads_by_rank),
        ("host_seconds", [0.1 * (rank + 1) for rank in range(len(reads_by_rank))]),
    ):
        lines.append(f"# TYPE sglang:prefixpack_{name}_total counter")
        lines += [
            f'sglang:prefixpack_{name}_total{{model_name="m",pp_rank="0",tp_rank="{rank}"}} {value}'
            for rank, value in enumerate(values)
        ]
    lines.append("# TYPE sglang:prefixpack_packed_steps_total counter")
    lines += [
        f'sglang:prefixpack_packed_steps_total{{mode="decode",model_name="m",pp_rank="0",tp_rank="{rank}"}} {packed}'
        for rank in range(len(reads_by_rank))
    ]
    return "\n".join(lines) + "\n"


def test_ranks_that_counted_the_same() -> None:
    ranks = ranks_in(metrics(500, 500), expected=2)
    totals = {"kv_tokens_read": 500.0, "packed_steps/decode": 7.0}
    assert ranks == Ranks({0: totals, 1: totals}, 2)
    assert ranks.alike
    assert ranks.differing == []


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
