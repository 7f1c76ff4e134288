"""Engines on several nodes of a Ray cluster: real ones, with a raylet, an object store and resources of their own each,
that happen to run on one machine. Needs the `ray` extra.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgl_prefix_attn.offline.engines import EngineArguments, EngineError, EngineMain
from sgl_prefix_attn.offline.messages import Outcome, Ready, Task
from sgl_prefix_attn.offline.ray_engines import RayEnginePool, connect
from sgl_prefix_attn.offline.runner import journal_of
from tests.offline import batches, fake_engine
from tests.offline.batches import finished, results
from tests.offline.fake_engine import engines_of_groups, executed, run

MIB = 1 << 20


class Nodes:
    """A cluster whose first node, where this process belongs to, runs no engines."""

    def __init__(self) -> None:
        cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the ray extra is not installed")
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * MIB}
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.ray: Any = None

    def __enter__(self) -> Nodes:
        self.ray = connect(self._cluster.address)
        return self

    def __exit__(self, *exception: object) -> None:
        self.ray.shutdown()
        self._cluster.shutdown()

    def add(self, cpus: int) -> Any:
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=80 * MIB)
        self._cluster.wait_for_nodes()
        return node

    def kill(self, node: Any) -> None:
        """As when its machine loses power: nothing is told to anybody."""
        self._cluster.remove_node(node, allow_graceful=False)

    def miss(self, node: Any) -> None:
        """Waits until Ray has noticed that a node is gone; meanwhile it would still start engines there."""
        deadline = time.monotonic() + 60
        while any(known["Alive"] for known in self.ray.nodes() if known["NodeID"] == node.node_id):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as cluster:
        yield cluster


class Started:
    """Starts engines on the cluster, and keeps what runs them."""

    def __init__(self, nodes: Nodes) -> None:
        self._ray = nodes.ray
        self.pools: list[RayEnginePool] = []

    def __call__(self, main: EngineMain, engines: Sequence[EngineArguments], gpus: int = 0) -> RayEnginePool:
        self.pools.append(RayEnginePool(self._ray, main, engines, gpus))
        return self.pools[-1]

    @property
    def node_ids(self) -> list[str]:
        """Of each engine of the last run."""
        return [machine.split()[-1] for machine in self.pools[-1].machines]


def on_one_engine_here(source: Path, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    run(source, folder / "out.jsonl")
    return results(folder / "out.jsonl")


def actors() -> list[psutil.Process]:
    """The processes of this machine's actors, and those of their engines."""
    found = [p for p in psutil.process_iter(["cmdline"]) if "ray::_Actor" in " ".join(p.info["cmdline"] or ())]
    return [*found, *(child for actor in found for child in actor.children(recursive=True))]


def later(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Does something as soon as something is so, meanwhile."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def one_request(connection: Connection, arguments: EngineArguments) -> None:
    """An engine for one request, which it answers unless it is told to die of it."""
    connection.send(Ready(room=0))
    task = connection.recv()
    if arguments.arguments == ("dies",):
        return
    connection.send(Outcome(task.number, fake_engine.answer([1], [])))
    connection.recv()


def test_what_others_finished_is_returned_before_it_is_told_that_one_is_gone(nodes):
    nodes.add(2)
    assert connect("auto") is nodes.ray
    with RayEnginePool(nodes.ray, one_request, [EngineArguments(("dies",)), EngineArguments(())]) as pool:
        pool.wait_ready()
        for engine in range(2):
            pool.submit(engine, Task(engine, "", b""))
        assert [outcome.number for outcome in pool.outcomes(20)] == [1]
        with pytest.raises(EngineError, match=r"engine 0, of 2 on Ray .*ended with status 0"):
            pool.outcomes(20)


@pytest.mark.parametrize("cpus", [1, 4])
def test_every_node_has_an_engine_and_no_group_is_split(nodes, tmp_path, cpus):
    expected_ids = {nodes.add(cpus).node_id for _ in range(2)}
    source, output = batches.write(tmp_path / "in.jsonl", batches.grouped(200, groups=16)), tmp_path / "out.jsonl"
    start = Started(nodes)
    summary = run(source, output, 2, start)
    assert (summary.requests, summary.failed) == (200, 0)
    assert set(start.node_ids) == expected_ids
    assert sorted(map(sorted, engines_of_groups(output))) == [[0]] * 8 + [[1]] * 8
    assert results(output) == on_one_engine_here(source, tmp_path / "here")


def test_a_node_that_dies_is_named_and_the_rest_goes_on_with_what_is_left(nodes, tmp_path):
    kept, lost = nodes.add(1), nodes.add(1)
    source, output = batches.write(tmp_path / "in.jsonl", batches.grouped(300)), tmp_path / "out.jsonl"
    start = Started(nodes)
    killing = later(lambda: finished(output) >= 60, lambda: nodes.kill(lost))
    with pytest.raises(EngineError, match=rf"engine \d, of 2 on Ray \(\S+, node {lost.node_id}\), is gone"):
        run(source, output, 2, start, seconds=0.02)
    killing.join()
    assert set(start.node_ids) == {kept.node_id, lost.node_id}
    assert not psutil.wait_procs(actors(), timeout=20)[1], "engines outlive a run that failed"
    nodes.miss(lost)
    with pytest.raises(ValueError, match=r"2 engines.* room for 1; start fewer engines, or add machines"):
        run(source, output, 2, start)
    before, done = finished(output), batches.read(journal_of(output))[1:]
    already = executed(output)
    summary = run(source, output, 1, start)
    assert 60 <= before == summary.resumed < 300
    assert start.node_ids == [kept.node_id]
    prompts = [str(line["body"]["prompt"]) for line in batches.read(source)]
    again = {prompt for _, prompt in executed(output)[len(already) :]}
    assert again == set(prompts) - {prompts[entry["line"] - 1] for entry in done}
    assert results(output) == on_one_engine_here(source, tmp_path / "here")
