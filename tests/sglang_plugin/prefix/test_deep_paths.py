"""Reading deep and wide trees takes time and memory in proportion to the nodes that are read."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest, int64_array
from sgl_prefix_attn.sglang_plugin.prefix.tree_mirror import TreeMirror
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import ObjectReader
from tests.support.fake_tree import FakeTree, Node, path_of

NODES = 100_000
# CPU seconds. Reading takes about a fifth; quadratic reading takes minutes.
LIMIT = 2.0


class Counting:
    """An ObjectReader that counts the nodes it hands out."""

    def __init__(self, tree: FakeTree) -> None:
        self._reader = ObjectReader(tree)
        self.read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def branches(self, handles: list[Any], end_of: Callable[[int], int]) -> Any:
        for branch in self._reader.branches(handles, end_of):
            self.read += 0 if branch is None else len(branch.ids)
            yield branch


def forest_of(mirror: TreeMirror, nodes: list[Node]) -> PrefixForest:
    ends = [path_of(node)[-1][2] for node in nodes] if len(nodes) < 100 else [1 << 30] * len(nodes)
    return mirror.forest(nodes, int64_array(ends), None)[0]


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def test_a_chain_is_read_in_linear_time() -> None:
    tree = FakeTree()
    chain = tree.chain(NODES)
    mirror = TreeMirror(ObjectReader(tree))
    assert seconds(lambda: forest_of(mirror, chain[-1:] * 2)) < LIMIT
    assert len(mirror) == NODES
    assert forest_of(mirror, chain[-1:] * 2).node_end.tolist() == [NODES]


def test_a_chain_is_read_in_linear_memory() -> None:
    def peak(nodes: int) -> int:
        tree = FakeTree()
        chain = tree.chain(nodes)
        mirror = TreeMirror(ObjectReader(tree))
        tracemalloc.start()
        forest_of(mirror, chain[-1:])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    # Tables that double when they are full are up to twice as large as they have to be; quadratic would be 64 times.
    assert peak(32_000) < 16 * peak(4000)


def test_requests_all_along_a_chain_are_read_in_linear_time() -> None:
    """As many requests as nodes, each one node further down."""
    tree = FakeTree()
    chain = tree.chain(NODES)
    mirror = TreeMirror(ObjectReader(tree))
    assert seconds(lambda: forest_of(mirror, chain)) < LIMIT
    forest = forest_of(mirror, chain)
    assert forest.num_nodes == NODES - 1
    np.testing.assert_array_equal(forest.tail_begin, np.minimum(np.arange(NODES) + 1, NODES - 1))


def test_nodes_that_are_known_are_not_read_again() -> None:
    tree = FakeTree()
    chain = tree.chain(1000)
    counted = Counting(tree)
    mirror = TreeMirror(counted)
    forest_of(mirror, chain[-1:])
    assert counted.read == 1000
    below = tree.add(chain[500])
    forest_of(mirror, [chain[-1], below])
    assert counted.read <= 1000 + 2, "the new node, and the one whose siblings it joins"


def test_a_new_group_beside_many_reads_only_nodes_that_may_be_below_it() -> None:
    """Groups below one prompt: nodes that end where the new group's node ends cannot be below it."""
    tree = FakeTree()
    (prompt,) = tree.chain(1, tokens=64)
    running = [tree.add(tree.add(prompt, tokens=32), tokens=8) for _ in range(100)]
    first = tree.add(prompt, tokens=40)
    counted = Counting(tree)
    mirror = TreeMirror(counted)
    lens = int64_array([1 << 20] * len(running))
    mirror.forest(running, lens, None)
    mirror.forest([*running[1:], first], lens, None)
    counted.read = 0
    second = tree.add(tree.split(first, tokens=32), tokens=8)
    forest, _ = mirror.forest([*running[2:], first, second], lens, None)
    assert counted.read <= 3, "the new group, its second member, and the first, which is below it now"
    assert (32 + 64) in forest.node_end[forest.node_parent >= 0].tolist()


@pytest.mark.parametrize("deep", [0, 50])
def test_a_split_below_a_parent_with_many_children_reads_only_nodes_in_use(deep: int) -> None:
    tree = FakeTree()
    parent = tree.chain(deep, tokens=3)[-1] if deep else tree.root_node
    children = [tree.add(parent, tokens=5) for _ in range(5000)]
    counted = Counting(tree)
    mirror = TreeMirror(counted)
    mirror.forest(children, int64_array([1 << 20] * len(children)), None)
    counted.read = 0
    running = children[:64]
    for number in range(64, 96):  # each step splits a node that nobody runs on and adds a request below the upper part
        newcomer = tree.add(tree.split(children[number], tokens=2), tokens=4)
        running.append(newcomer)
        forest_of(mirror, running[-64:])
    assert counted.read <= 32 * (64 + 2)


def test_a_tree_that_contradicts_the_mirror_is_read_from_scratch() -> None:
    tree = FakeTree()
    node = tree.add(tokens=10)
    mirror = TreeMirror(ObjectReader(tree))
    forest_of(mirror, [node, node])
    upper = tree.split(node, tokens=4)
    node.key = range(9)  # no split moves a node's end
    newcomer = tree.add(upper, tokens=3)
    forest = forest_of(mirror, [node, node, newcomer])
    assert mirror.restarts == 1
    assert forest.node_end.tolist() == [4, 13]


def test_a_reading_that_was_broken_off_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = FakeTree()
    node = tree.add(tokens=10)
    reader = ObjectReader(tree)
    mirror = TreeMirror(reader)
    forest_of(mirror, [node, node])
    newcomer = tree.add(tree.split(node, tokens=4), tokens=3)
    monkeypatch.setattr(reader, "find", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        forest_of(mirror, [node, node, newcomer])
    monkeypatch.undo()
    assert forest_of(mirror, [node, node, newcomer]).node_end.tolist() == [4, 10]
