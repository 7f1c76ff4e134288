"""Recorded steps: the server's ring, the clock on a GPU, the file, and policies over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.abtest import recording
from sgl_prefix_attn.abtest.client import StepBar
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import live_plan
from sgl_prefix_attn.routing.cost import CostModel
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.live_plan import RecordPlan
from sgl_prefix_attn.sglang_plugin.dispatch.live_abtest import StepClock
from sgl_prefix_attn.sglang_plugin.dispatch.step_recording import StepRecording
from tests.routing.profiles import write_profile

PATHS = [[(1, 0, 200)], [(1, 0, 200)], []]
SHAPE = ModelShape(4, 2, 64, kv_bytes=4)
_COLUMNS = list(live_plan.RECORDED)
HUGE = {"columns": _COLUMNS, "facts": None, "us": [1], "features": [[10**30] * len(_COLUMNS)], "ran": ["packed"]}


def handed(lens: list[int], forest: PrefixForest) -> Any:
    return SimpleNamespace(paths=SimpleNamespace(mode="decode", forest=forest), seq_lens=torch.tensor(lens))


def recorded(steps: int, plan: RecordPlan) -> StepRecording:
    """A recording of `steps` decode steps; every third has no paths."""
    forest = PrefixForest.from_paths(PATHS)
    made = StepRecording(plan, StepClock(cuda=False))
    for index in range(steps):
        no_paths = SimpleNamespace(paths="no_paths", seq_lens=None)
        step = no_paths if index % 3 == 2 else handed([201 + index, 205 + index, 9 + index], forest)
        made.step(True, step, 3)
        made.ran("stock" if index % 3 == 2 else "packed")
        made.lease.renew()
    return made


def pages(made: StepRecording, first: int = 0) -> Iterator[dict[str, Any]]:
    while (answer := made.answer(first))["us"]:
        yield answer
        first = answer["first"] + len(answer["us"])


@pytest.mark.parametrize("steps", [0, 1, 500, 512, 513, 1700])
def test_the_ring_has_the_newest_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_prefix_attn.sglang_plugin.dispatch.step_recording.ROWS_OF_AN_ANSWER", 200)
    made = recorded(steps, RecordPlan(steps=512))
    found = list(pages(made))
    oldest = max(0, steps - 512)
    features = [row for page in found for row in page["features"]]
    assert [page["first"] for page in found] == list(range(oldest, steps, 200))
    assert made.steps_done == steps
    facts = ForestFacts.of(PrefixForest.from_paths(PATHS))
    for index, row in zip(range(oldest, steps), features, strict=True):
        lens = np.array([201, 205, 9]) + index
        known = [getattr(StepFeatures.of(facts, lens), name) for name in live_plan.RECORDED]
        assert row == ([3] + (len(known) - 1) * [-1] if index % 3 == 2 else known)
    ran = [kind for page in found for kind in page["ran"]]
    assert ran == ["stock" if index % 3 == 2 else "packed" for index in range(oldest, steps)]
    us = [value for page in found for value in page["us"]]
    assert us.count(None) == min(steps, 1), "the last step has no end yet"


@pytest.mark.parametrize("decode", [True, False])
def test_a_recording_whose_client_is_gone_ends_and_is_dropped(decode: bool) -> None:
    made = StepRecording(RecordPlan(steps=512, lease_steps=20), StepClock(cuda=False))
    step = handed([201, 205, 9], PrefixForest.from_paths(PATHS))
    for _ in range(40):
        made.step(decode, step, 3)
        made.ran("packed")
    assert (made.status, made.steps_done, made.answer()["us"]) == ("expired", 20 if decode else 0, [])
    assert made._features.base is None, "no view that keeps the ring's memory"
    assert made._features.size == 0


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


def answer(made: StepRecording) -> dict[str, Any]:
    facts = {"gpu": "cpu", "capability": "", "dtype": "fp32", "packed": "cpu", "stock": "torch_native"}
    return {**made.answer(), "facts": {**facts, "shape": vars(SHAPE)}, "layers": 2, "policy": "cost"}


def test_policies_over_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The time of a step that goes elsewhere is the recorded time and the predicted difference in both layers."""
    path = tmp_path / "steps.json"
    path.write_bytes(recording.as_file([answer(recorded(30, RecordPlan(steps=512)))]))
    packed, stock = {"launch": 100.0}, {"launch": 150.0, "requests": 1e3}
    profile = write_profile(tmp_path, packed, stock, kernels="cpu", backend="torch_native")
    policies = ["packed", "stock", "cost", "batch>=4", f"{profile}@30"]
    assert main(["abtest", "steps", str(path), *policies, "--profile", profile, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    (copy,) = recording.read_recording(path)
    counted = [row for row in range(30) if row % 3 != 2]
    mean = float(np.mean(copy.us[counted]))
    step = copy.step(0)
    assert step is not None
    more = 2 * (CostModel("stock", stock).microseconds(step, SHAPE) - 100.0)
    for name in policies:
        on_stock = name in ("stock", "batch>=4")
        row = rows[name]
        assert (row["steps"], row["packed"], row["moved"]) == (20, 0 if on_stock else 20, 20 if on_stock else 0)
        assert row["server_us"] == pytest.approx(mean)
        assert row["us"] == pytest.approx(mean + on_stock * more)
    assert main(["abtest", "steps", str(path), *policies]) == 0
    out = capsys.readouterr().out
    assert "30 decode steps of a server with policy cost; no profile fits" in out
    assert out.splitlines()[3].split()[-2:] == ["?", "?"]
    assert main(["abtest", "steps", str(path), *policies, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["stock"]["us"] is None


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("{}", ["packed"], "not a recording of `abtest record`: KeyError('copies')"),
        ('{"copies": [{"columns": ["requests"]}]}', ["packed"], "columns ['requests']; this release reads"),
        ('{"copies": ' + "[" * 100_000 + "}", ["packed"], "not a recording of `abtest record`: RecursionError"),
        ('{"copies": [' + json.dumps(HUGE) + "]}", ["packed"], "not a recording of `abtest record`: OverflowError"),
        ('{"copies": []}', ["packed"], "the recording has no step: the server got no request meanwhile"),
    ],
)
def test_unusable_recordings_are_named(content, arguments, message, tmp_path, capsys):
    path = tmp_path / "steps.json"
    path.write_text(f'{{"format": "{recording.FORMAT}",{content[1:]}'.replace(",}", "}"))
    assert main(["abtest", "steps", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--packed triton", "--stock fa3", "--families"])
def test_options_of_measured_steps_are_refused_for_a_recording(option, tmp_path, capsys):
    path = tmp_path / "steps.json"
    path.write_bytes(recording.as_file([answer(recorded(30, RecordPlan(steps=512)))]))
    assert main(["abtest", "steps", str(path), "cost", *option.split()]) == 2
    assert f"{option.split()[0]} is for measured steps" in capsys.readouterr().err


def test_steps_of_a_gpu_without_a_shipped_profile_say_whose_decides(tmp_path, capsys):
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_attention.json"
    path = tmp_path / "results.json"
    path.write_text(results.read_text().replace('"NVIDIA H200"', '"NVIDIA L40S"'))
    assert main(["abtest", "steps", str(path), "cost", "packed"]) == 0
    note = "no shipped profile is of NVIDIA L40S with packed native, stock fa3 and 16-bit KV: that of NVIDIA H200"
    assert note in capsys.readouterr().out
    assert main(["abtest", "steps", str(path), "cost", "--json"]) == 0
    assert note in json.loads(capsys.readouterr().out)["notes"][0]


def test_deeply_nested_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    path.write_text("[" * 100_000)
    assert main(["abtest", "steps", str(path), "packed"]) == 2
    assert "not JSON: maximum recursion depth" in capsys.readouterr().err


def test_steps_has_a_row_for_each_policy_and_family(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["packed", "conservative", "shipped@5"]
    results = str(Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_attention.json")
    assert main(["abtest", "steps", results, *policies, "--stock", "fa3", "--families"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    families = ["pat", "fasttree", "random", "rl", "agents", "chat", "none"]
    assert [row[0] for row in rows] == [name for policy in policies for name in (policy, *families)]
    steps, packed = rows[0][1:3]
    assert steps == packed


def test_a_bar_says_when_no_step_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(StepBar, "IDLE_SECONDS", -1.0)
    with StepBar(8, "record") as bar:
        bar.reach(3)
        assert "no decode step runs" not in capsys.readouterr().err
        bar.reach(3)
        assert "no decode step runs: send requests to the server" in capsys.readouterr().err
