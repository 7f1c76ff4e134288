"""Totals of a server's ranks, and that ranks which counted something else are told from those that did not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import __main__ as command
from benchmarks.serving import ranks as ranks_module
from benchmarks.serving.ranks import Ranks, ranks_in, read_ranks
from benchmarks.serving.report import Report
from tests.benchmarks.serving.test_serving import run_of
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


def test_a_rank_that_read_something_else() -> None:
    ranks = ranks_in(metrics(500, 501), expected=2)
    assert not ranks.alike
    assert ranks.differing == ["kv_tokens_read"]


@pytest.mark.parametrize("text", [metrics(500), metrics(500, 500, 500), ""])
def test_ranks_missing_or_too_many(text: str) -> None:
    assert not ranks_in(text, expected=2).alike


class FakeServer:
    """Answers with one text after the other, the last one again and again."""

    def __init__(self, tp: int, backend: str, *texts: str) -> None:
        self.tp, self.backend, self.texts = tp, backend, list(texts)

    def info(self) -> dict[str, Any]:
        return {"tp_size": self.tp, "internal_states": [{self.backend: {}}]}

    def get(self, path: str) -> str:
        assert path == "/metrics"
        return self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]


def test_a_rank_that_is_behind_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "WAIT_SECONDS", 120)
    late: Any = FakeServer(2, "prefixpack", metrics(500, 499), metrics(500, 500))
    ranks = read_ranks(late)
    assert ranks is not None
    assert ranks.alike
    monkeypatch.setattr(ranks_module, "WAIT_SECONDS", 0.3)
    never: Any = FakeServer(2, "prefixpack", metrics(500, 499))
    ranks = read_ranks(never)
    assert ranks is not None
    assert not ranks.alike


def test_nothing_to_compare() -> None:
    one: Any = FakeServer(1, "prefixpack")
    stock: Any = FakeServer(2, "fa3")
    assert read_ranks(one) is None
    assert read_ranks(stock) is None


def test_report_of_ranks(tmp_path: Path) -> None:
    report = Report(tmp_path / "r.json", {"tp": 2})
    for reads in ((500, 500), (500, 501), (500,)):
        report.add(run_of("prefixpack", [5, 6]), "prefixpack", {})
        report.add_ranks(ranks_in(metrics(*reads), expected=2))
    report.add(run_of("fa3", [5, 6]), "fa3", {})
    report.add_ranks(None)
    content = json.loads((tmp_path / "r.json").read_text())
    assert [run.get("ranks", {}).get("alike") for run in content["runs"]] == [True, False, False, None]
    assert content["runs"][1]["ranks"]["totals"]["1"]["kv_tokens_read"] == 501
    lines = report.table().splitlines()
    assert lines[1].split()[:3] == ["rl", "prefixpack", "2"]
    assert [line for line in lines if "ranks" in line.lower()] == [
        "rl, prefixpack: 2 ranks counted the same: 500 KV tokens read",
        "rl, prefixpack: RANKS COUNTED DIFFERENTLY: kv_tokens_read",
        "rl, prefixpack: 1 of 2 ranks counted anything",
    ]


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
