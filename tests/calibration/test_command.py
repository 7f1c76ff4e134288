"""`python -m sgl_prefix_attn calibrate`: on the CPU, and with a machine made up from known costs."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.calibration import cli, command, run
from sgl_prefix_attn.calibration.bench import DeviceLostError, Shape, Ways
from sgl_prefix_attn.calibration.command import FIT_SEEDS, Counts, calibrate
from sgl_prefix_attn.calibration.kernels.fixture import Fixture, KvPool
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.cost import KernelCost
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.profile import load_profile
from sgl_prefix_attn.routing.profile_store import user_folder
from sgl_prefix_attn.routing.versions import KERNELS_VERSION
from sgl_prefix_attn.workloads import ALL_FAMILIES, draw
from sgl_prefix_attn.workloads.case import Case

SHAPE = Shape((8, 2), 64, "bf16", "bf16")
COUNTS = Counts(fit=27, check=9)


class MadeUpBench:
    """Kernels with known costs and some noise.

    stop_after: the device is lost at this batch. steps: the file that has to hold all batches measured before.
    """

    most_unique_bytes = 1e9
    draw_kv_dtype = "bf16"
    packed_name = "native"
    ways: tuple[str, ...] = ("prefixpack", "fa3", "triton")
    packed = KernelCost("packed", {"launch": 18.0, "unique_mb": 0.25, "links": 0.3, "shares": 4.0})
    stock = KernelCost("stock", {"launch": 12.0, "unique_mb": 0.22, "repeated_mb": 0.1, "requests": 14.0})

    def __init__(self, stop_after: int | None = None, steps: Path | None = None) -> None:
        self.left, self.steps = stop_after, steps
        self.measured: list[str] = []
        self.lost: str | None = None

    def machine(self) -> dict[str, Any]:
        return {"gpu": "Made Up GPU", "capability": "9.0", "date": "today"}

    def measure(self, case: Case) -> Ways:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.lost = case.key
                raise DeviceLostError("prefixpack: an illegal access")
        if self.steps is not None and self.measured:
            rows = json.loads(self.steps.read_text())["rows"]
            assert len(rows) == len(self.measured), "a killed run would lose some"
        self.measured.append(case.key)
        step = StepFeatures.of(ForestFacts.of(case.forest()), case.lengths)
        rng = np.random.default_rng(len(case.key) + step.tokens)
        found = {
            "prefixpack": {"cold_us": self.packed.microseconds(step, case.shape) * rng.normal(1, 0.01)},
            "fa3": {"cold_us": self.stock.microseconds(step, case.shape) * rng.normal(1, 0.01)},
            "triton": {"failed": "not today"},
            "flashinfer_decode_tc": {"cold_us": 500.0 + step.requests},
        }
        return {way: found[way] for way in self.ways}


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


def test_what_it_finds_of_a_machine_with_known_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments("--out", str(tmp_path / "p.json"))
    profile = calibrate(MadeUpBench(), SHAPE, args, ALL_FAMILIES, COUNTS)
    assert load_profile(tmp_path / "p.json") == profile
    assert {path.name for path in tmp_path.iterdir()} == {"p.json", "p.steps.json", "p.report.json"}
    assert (profile.machine, profile.capability, profile.head_shapes) == ("Made Up GPU", "9.0", ["8/2/64"])
    assert list(profile.stock) == ["fa3"]
    assert profile.stock["fa3"].error < 0.03
    out = capsys.readouterr().out
    assert "packed native or stock fa3: 5 unseen seeds" in out
    assert "triton has no time of 81 of 81 batches, mostly: not today\n--retry-failed measures" in out
    report = json.loads((tmp_path / "p.report.json").read_text())
    (pair,) = report["pairs"].values()
    total = pair["rows"][0]
    assert total["steps"] == 5 * COUNTS.check
    assert total["regret"] < 0.02
    assert total["low"] <= total["mean_regret"] <= total["high"]
    assert {row["family"] for row in pair["rows"][1:]} == set(ALL_FAMILIES)
    steps = json.loads((tmp_path / "p.steps.json").read_text())
    fitted = {row["key"].split(".")[0] for row in steps["rows"] if row["set"] == "fit"}
    assert not fitted & {row["key"].split(".")[0] for row in steps["rows"] if row["set"] == "check"}, "unseen"


def test_names_that_differ_after_a_dot_are_runs_of_their_own(tmp_path: Path) -> None:
    for name in ("llama-3.1", "llama-3.2.json"):
        calibrate(MadeUpBench(), SHAPE, arguments("--out", str(tmp_path / name)), ALL_FAMILIES, COUNTS)
    endings = ("steps.json", "report.json")
    beside = {f"llama-3.{n}.{ending}" for n in (1, 2) for ending in endings}
    assert {path.name for path in tmp_path.iterdir()} == {"llama-3.1", "llama-3.2.json", *beside}


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WRITTEN_SECONDS", -1.0)
    args = arguments("--out", str(tmp_path / "p.json"))
    stopped, again = MadeUpBench(stop_after=40, steps=tmp_path / "p.steps.json"), MadeUpBench()
    with pytest.raises(DeviceLostError):
        calibrate(stopped, SHAPE, args, ALL_FAMILIES, COUNTS)
    seeds = json.loads((tmp_path / "p.steps.json").read_text())["check_seeds"]
    calibrate(again, SHAPE, args, ALL_FAMILIES, COUNTS)
    assert len(stopped.measured) == 40
    assert not set(stopped.measured) & set(again.measured)
    assert stopped.lost is not None
    assert stopped.lost not in again.measured, "it would be lost again"
    steps = json.loads((tmp_path / "p.steps.json").read_text())
    assert steps["check_seeds"] == seeds
    assert sum(row["set"] == "fit" for row in steps["rows"]) == 3 * COUNTS.fit
    with pytest.raises(ValueError, match="other arguments, another machine or other kernels; --fresh drops them"):
        calibrate(again, SHAPE, arguments("--out", str(tmp_path / "p.json"), "--seed", "3"), ALL_FAMILIES, COUNTS)


def test_batches_are_measured_again_for_a_kernel_that_was_not_there(tmp_path: Path, capsys: Any) -> None:
    """As with --jit, or after a stock kernel was installed."""
    out = ["--out", str(tmp_path / "p.json")]
    few = Counts(fit=9, check=9)
    first, same, more, retried = (MadeUpBench() for _ in range(4))
    first.ways = ("prefixpack", "fa3")
    more.ways = retried.ways = (*MadeUpBench.ways, "flashinfer_decode_tc")
    calibrate(first, SHAPE, arguments(*out), ALL_FAMILIES, few)
    same.ways = first.ways
    capsys.readouterr()
    calibrate(same, SHAPE, arguments(*out), ALL_FAMILIES, few)
    assert same.measured == []
    assert "fit: all 27 batches are in" in capsys.readouterr().out
    profile = calibrate(more, SHAPE, arguments(*out), ALL_FAMILIES, few)
    assert set(more.measured) >= set(first.measured)
    assert list(profile.stock) == ["fa3", "flashinfer_tc"]
    assert "fit: 27 batches are measured again, on which a kernel was not there" in capsys.readouterr().out
    calibrate(retried, SHAPE, arguments(*out, "--retry-failed"), ALL_FAMILIES, few)
    assert set(retried.measured) == set(more.measured), "triton failed on all"
    rows = json.loads((tmp_path / "p.steps.json").read_text())["rows"]
    assert len(rows) == len({(row["set"], row["key"]) for row in rows})


def test_a_run_that_was_killed_goes_on_with_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, steps = tmp_path / "p.json", tmp_path / "p.steps.json"
    families = ["--families", "rollouts", "few_shot"]
    words = ["calibrate", "--device", "cpu", "--minutes", "60", *families, "--heads", "4/2", "--out", str(out)]

    def rows() -> list[dict[str, Any]]:
        return list(json.loads(steps.read_text())["rows"]) if steps.exists() else []

    with subprocess.Popen([sys.executable, "-m", "sgl_prefix_attn", *words]) as killed:
        while killed.poll() is None and len(rows()) < 3:
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, "it ended before it was killed"
    had, counts = rows(), Counts(fit=10, check=4)
    monkeypatch.setattr(command, "CPU_COUNTS", counts)
    assert main(words) == 0
    assert rows()[: len(had)] == had
    assert len(rows()) >= FIT_SEEDS * counts.fit + 5 * counts.check
    assert load_profile(out).source == "p.part.steps.json"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"p.json", "p.steps.json", "p.report.json"}


def test_both_kv_types_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "make_bench", lambda args, shape, cuda: MadeUpBench())
    monkeypatch.setattr(command, "CUDA_COUNTS", COUNTS)
    words = ["calibrate", "--heads", "8/2", "--head-dim", "64", "--kv-dtype", "bf16", "fp8_e4m3"]
    assert main(words) == 0
    for kv_dtype, kv_bytes in (("bf16", 2), ("fp8_e4m3", 1)):
        profile = load_profile(user_folder() / f"made-up-gpu-8-2-64-{kv_dtype.replace('_', '-')}.json")
        assert (profile.kv_bytes, profile.kernels_version) == (kv_bytes, KERNELS_VERSION)
    assert main([*words, "--out", str(tmp_path / "x.json")]) == 2


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_pages_are_whole_and_shared_ones_are_those_of_all_requests(page_size: int) -> None:
    """On the CPU; kernels see the same tensors."""
    for seed, family in enumerate(ALL_FAMILIES):
        drawn = draw(seed, family, (4, 2), 64, most_unique_bytes=2e6)
        case = drawn.with_pages(page_size)
        pool = KvPool(case.slots(page_size) * 2 * 64, torch.device("cpu"))
        fixture = Fixture(case, pool, torch.device("cpu"), page_size=page_size)
        assert all(begin % page_size == end % page_size == 0 for path in case.paths for _, begin, end in path)
        assert case.forest().num_requests == len(case.seq_lens)
        owners: dict[int, Any] = {}
        for request, (path, length) in enumerate(zip(case.paths, case.seq_lens, strict=True)):
            slots = fixture.table[request, :length]
            by_page = fixture.pages[request].repeat_interleave(page_size)[:length] * page_size
            assert torch.equal(slots, by_page + torch.arange(length) % page_size)
            for node, begin, end in path:
                assert owners.setdefault(node, slots[begin:end].tolist()) == slots[begin:end].tolist()
            owners[-1 - request] = slots[path[-1][2] if path else 0 :].tolist()
        used = [slot for slots in owners.values() for slot in slots]
        assert len(used) == len(set(used)) == case.unique_tokens
        assert max(used) < case.slots(page_size)


def test_the_whole_command_on_the_cpu(tmp_path, monkeypatch, capsys):
    """The profile is then the one that a CPU server takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    families = ["rollouts", "few_shot", "ragged"]
    words = ["calibrate", "--device", "cpu", "--minutes", "1", "--families", *families, "--heads", "4/2"]
    assert main([*words, "--page-size", "4"]) == 0
    out = capsys.readouterr().out
    assert "packed cpu or stock torch_native: 5 unseen seeds" in out
    (path,) = (path for path in user_folder().glob("*.json") if path.name.count(".") == 1)
    assert path.name == "cpu-4-2-64-fp32-page4.json"
    assert (load_profile(path).kv_bytes, load_profile(path).page_size) == (4, 4)
    assert main(["route", "profiles", "--gpu", "cpu"]) == 0
    assert "cpu-4-2-64-fp32-page4.json: cpu, heads 4/2/64, 32-bit KV, pages of 4" in capsys.readouterr().out


def test_the_kernels_that_servers_take_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "why_not_native", lambda device, asked: None if asked else "they never ran")
    assert [command.packed_kernels(kernels) for kernels in ("auto", "native", "triton")] == [
        "triton", "native", "triton",
    ]  # fmt: skip
    assert "the Triton kernels are measured: they never ran" in capsys.readouterr().out
    bench = MadeUpBench()
    bench.packed_name = "triton"
    calibrate(bench, SHAPE, arguments(), ALL_FAMILIES, COUNTS)
    assert (user_folder() / "made-up-gpu-8-2-64-bf16-triton.json").exists(), "beside that of the native kernels"


def test_heads_of_a_model(tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = command.shape_of(arguments("--model", str(tmp_path), "--tp", "4"), cuda=True)
    assert run.model_shape(shape) == ModelShape(8, 2, 128, kv_bytes=2)


def test_times_of_a_kernel_stay_when_a_batch_is_measured_again(tmp_path: Path) -> None:
    steps = run.StepsFile(tmp_path / "steps.json", {})
    row, measured, lost = {"set": "fit", "key": "batch"}, {"cold_us": 5.0}, {"failed": "the device was lost"}
    steps.add({**row, "baselines": {"fa3": measured, "triton": lost}})
    steps.add({**row, "baselines": {"fa3": lost, "triton": measured, "flashinfer": lost}})
    steps.add({**row, "baselines": {"triton": {"cold_us": 4.0}}})
    (found,) = steps.rows
    assert found["baselines"] == {"fa3": measured, "triton": {"cold_us": 4.0}, "flashinfer": lost}


def test_steps_that_cannot_be_written_leave_the_last_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = run.StepsFile(tmp_path / "of a run" / "steps.json", {})
    before = steps.path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"steps\.json: cannot write \d+ bytes: No space left on device"):
        steps.write()
    assert [path.read_bytes() for path in steps.path.parent.iterdir()] == [before]
    with pytest.raises(ValueError, match=r"steps\.json: cannot make the folder: (File exists|Not a directory)"):
        run.StepsFile(steps.path / "below" / "steps.json", {})
