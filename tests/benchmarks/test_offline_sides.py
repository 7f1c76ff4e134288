"""The batch runner as a side of the offline benchmark, with a stand-in for the engine."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.offline import sides
from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.offline import fake_engine

JOB = ([[20 + n] * 40 for n in range(4)], 4)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> sides.Launch:
    monkeypatch.setattr(sides.engine_process, "main", fake_engine.main)
    return sides.Launch(("0", "0", str(tmp_path / "executed")), (), str(tiny_model("llama")))


def test_a_runner_serves_batch_after_batch(launch: sides.Launch) -> None:
    ours, theirs = multiprocessing.Pipe()
    for job in (JOB, JOB, None):
        ours.send(job)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(sides.serve_runner, theirs, launch).result(timeout=60)
    ready, first, second = (ours.recv() for _ in range(3))
    assert ready is None
    assert first.outputs == second.outputs
    assert len(first.outputs) == len(JOB[0])


def test_an_error_ends_the_engine(launch: sides.Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no batch")

    monkeypatch.setattr(sides, "run_batch", fails)
    _, theirs = multiprocessing.Pipe()
    with pytest.raises(RuntimeError, match="no batch"):
        sides.serve_runner(theirs, launch)
    assert multiprocessing.active_children() == []
