"""Policies over measured steps, and the clock of a server's steps on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.abtest.client import StepBar
from sgl_prefix_attn.sglang_plugin.dispatch.live_abtest import StepClock

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Event:
    """A CUDA event whose work is done when the test says so; waiting for it is an error."""

    done = 0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        Event.made += 1
        self.at = Event.made

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "the host would wait for the device"
        return float(end.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


@pytest.mark.parametrize("behind", [0, 1, 7, 200, 1000])
def test_times_on_a_gpu_are_events_that_nothing_waits_for(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """behind: steps by which the device is behind the host."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", Event.synchronize)
    Event.made = Event.done = 0
    clock = StepClock(cuda=True)
    us = np.full(3000, np.nan)
    for row in range(3000):
        Event.done = max(0, row - behind)
        clock.begin(row if row % 5 else None)  # every fifth is a prefill
        clock.collect(us)
    known = ~np.isnan(us)
    assert set(us[known].tolist()) <= {1000.0}
    assert not known[::5].any()
    assert known.sum() == 0 if behind > 256 else known.sum() >= 0.8 * (3000 - behind) - 8


def test_auto_is_the_policy_of_the_files_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    path.write_text((RESULTS / "gpu_drawn.json").read_text().replace('"NVIDIA H200"', '"NVIDIA L40S"'))
    for results, other in ((str(path), "conservative"), (str(RESULTS / "gpu_drawn.json"), "saved>=16")):
        assert main(["abtest", "steps", results, "auto", other, "conservative", "--json"]) == 0
        auto, _, conservative = json.loads(capsys.readouterr().out)["rows"]
        assert (auto["packed"] == conservative["packed"]) == (other == "conservative")


def test_verdicts_add_up_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four steps, packed and stock microseconds; the last two are of a second file."""
    times, rows = ((10.0, 20.0), (30.0, 20.0), (100.5, 100.0), (110.0, 100.0)), []
    for number, (packed, stock) in enumerate(times):
        step = {"requests": 1 + number, "tokens": 100, "unique_tokens": 100, "links": 0, "nodes": 0}
        baselines = {"prefixpack": {"cold_us": packed}, "fa3": {"cold_us": stock}}
        rows.append(
            {"key": f"k{number}", "case": "a/b", "q_heads": 8, "kv_heads": 8, "step": step, "baselines": baselines}
        )
    header = {"machine": {"gpu": "NVIDIA H200"}, "commit": "abc"}
    for number in (0, 1):
        (tmp_path / f"{number}.json").write_text(json.dumps({**header, "rows": rows[2 * number :][:2]}))
    files = [str(tmp_path / f"{number}.json") for number in (0, 1)]
    assert main(["abtest", "steps", *files, "packed", "batch>=3", "--json"]) == 0
    packed, large = json.loads(capsys.readouterr().out)["rows"]
    assert (packed["steps"], packed["packed"], packed["behind"]) == (4, 4, 2)
    assert packed["mean_regret"] == pytest.approx((0 + 0.5 + 0.005 + 0.1) / 4)
    assert packed["regret"] == pytest.approx(250.5 / 230 - 1)
    assert packed["worst"] == [pytest.approx(0.5), "k1"]
    assert packed["oracle"] == pytest.approx(2**0.25)
    assert (large["packed"], large["behind"]) == (2, 1)
    assert large["mean_regret"] == pytest.approx((1.0 + 0 + 0.005 + 0.1) / 4)


def test_deeply_nested_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    path.write_text("[" * 100_000)
    assert main(["abtest", "steps", str(path), "packed"]) == 2
    assert "not JSON: maximum recursion depth" in capsys.readouterr().err


def test_steps_has_a_row_for_each_policy_and_family(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["packed", "conservative", "saved>=5"]
    results = str(RESULTS / "gpu_attention.json")
    assert main(["abtest", "steps", results, *policies, "--stock", "fa3", "--families"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:-1]]
    families = ["pat", "fasttree", "random", "rl", "agents", "chat", "none"]
    assert [row[0] for row in rows] == [name for policy in policies for name in (policy, *families)]
    steps, packed = rows[0][1:3]
    assert steps == packed


def test_a_bar_says_when_no_step_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(StepBar, "IDLE_SECONDS", -1.0)
    with StepBar(8, "A/B") as bar:
        bar.reach(3)
        assert "no decode step runs" not in capsys.readouterr().err
        bar.reach(3)
        assert "no decode step runs: send requests to the server" in capsys.readouterr().err
