"""Engines on a Ray cluster do what engines on this machine do. Needs the `ray` extra, but for the first test."""

from __future__ import annotations

import functools
import sys
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
from tests.offline import fake_engine

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
