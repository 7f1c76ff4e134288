"""Engines on a Ray cluster do what engines on this machine do. Needs the `ray` extra, but for the first test."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sgl_prefix_attn.offline.answers import Answer
from sgl_prefix_attn.offline.engines import EngineArguments, EngineError, Outcome, Ready, Task
from sgl_prefix_attn.offline.ray_engines import RayEnginePool, RayMissingError, connect
from sgl_prefix_attn.offline.runner import run_batch
from sgl_prefix_attn.offline.tokenize import PromptEncoder
from tests.offline import batches, fake_engine

REPOSITORY = Path(__file__).parents[2]


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissingError, match=r"pip install 'sgl-prefix-attn\[ray\]'"):
        connect("auto")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield connect("local")
    ray.shutdown()


def run(cluster: Any, source: Path, output: Path, engines: int, **more: Any):
    options = fake_engine.options(source, output, engines, **more)
    start = functools.partial(RayEnginePool, cluster)
    return run_batch(options, fake_engine.main, PromptEncoder(str(output.parent)).encode, start=start)


def test_the_end_of_an_engine_is_told_with_its_log_and_the_next_run_goes_on(cluster, tmp_path):
    lines = [*batches.grouped(100), batches.line(100, [fake_engine.DEADLY_TOKEN])]
    source, output = batches.write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with pytest.raises(EngineError, match="the engine has found something deadly"):
        run(cluster, source, output, engines=1, seconds=0.001)
    before = len(batches.read(tmp_path / "out.jsonl.journal")) - 1
    assert run(cluster, source, output, engines=1).resumed == before
    assert len(batches.read(output)) == 101


def actors() -> list[psutil.Process]:
    """The processes of this machine's actors, and those of their engines."""
    found = [p for p in psutil.process_iter(["cmdline"]) if "ray::_Actor" in " ".join(p.info["cmdline"] or ())]
    return [*found, *(child for actor in found for child in actor.children(recursive=True))]


def one_request(connection: Connection, arguments: EngineArguments) -> None:
    """An engine for one request, which it answers unless it is told to die of it."""
    connection.send(Ready(room=0))
    task = connection.recv()
    if arguments.arguments == ("dies",):
        return
    connection.send(Outcome(task.number, Answer((), 1)))
    connection.recv()


def test_what_others_finished_is_returned_before_it_is_told_that_one_is_gone(cluster):
    with RayEnginePool(cluster, one_request, [EngineArguments(("dies",)), EngineArguments(())]) as pool:
        pool.wait_ready()
        for engine in range(2):
            pool.submit(engine, Task(engine, np.array([1], dtype=np.int32), {}))
        assert [outcome.number for outcome in pool.outcomes(20)] == [1]
        with pytest.raises(EngineError, match=r"engine 0, of 2 on Ray .*ended with status 0"):
            pool.outcomes(20)


def test_a_killed_run_takes_its_engines_with_it_and_can_go_on(cluster, tmp_path):
    source, output = batches.write(tmp_path / "in.jsonl", batches.grouped(100)), tmp_path / "out.jsonl"
    address = cluster.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.offline.fake_engine", source, output, "2", "0.1", "--address", address]
    process = subprocess.Popen(list(map(str, command)), cwd=REPOSITORY)
    executed = tmp_path / "out.jsonl.executed"
    deadline = time.monotonic() + 60
    while (not executed.exists() or executed.read_text().count("\n") < 20) and time.monotonic() < deadline:
        time.sleep(0.05)
    running = actors()
    assert len(running) >= 4
    process.kill()
    process.wait()
    assert not psutil.wait_procs(running, timeout=30)[1], "engines outlive a killed run"
    summary = run(cluster, source, output, engines=2)
    assert summary.resumed > 0
    assert len(batches.read(output)) == 100


def test_gpus_of_an_engine_are_those_of_one_machine(cluster, tmp_path):
    options = fake_engine.options(tmp_path / "in", tmp_path / "out.jsonl", engines=4)
    with pytest.raises(ValueError, match=r"4 engines, each with 2 GPUs and a CPU of one machine.* room for 0"):
        RayEnginePool(cluster, fake_engine.main, options.engines, gpus=2)
