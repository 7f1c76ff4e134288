"""PrefixForest and RadixMirror: what two requests share is what their paths share, no more and no less."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest, RadixMirror, int64_array


def shared_positions(forest: PrefixForest, a: int, b: int) -> int:
    """KV positions that the forest lets requests a and b read together."""
    first = {int(request): place for place, request in enumerate(forest.order)}
    end = 0
    for node in range(forest.num_nodes):
        if all(forest.node_first[node] <= first[r] < forest.node_last[node] for r in (a, b)):
            end = max(end, int(forest.node_end[node]))
    return end


def common_prefix(a: list[tuple[int, int, int]], b: list[tuple[int, int, int]]) -> int:
    end = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        end = x[2]
    return end


class RandomTree:
    """A radix tree that grows, splits and is walked, as SGLang's does; the mirror is kept up to date beside it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.parent: dict[int, int] = {}
        self.range: dict[int, tuple[int, int]] = {}
        self.next_id = 0

    def add(self) -> int:
        parent = int(self.rng.choice([-1, *self.parent])) if self.parent else -1
        begin = self.range[parent][1] if parent >= 0 else 0
        return self._new(parent, begin, begin + int(self.rng.integers(1, 40)))

    def split(self) -> None:
        long = [node for node, (begin, end) in self.range.items() if end - begin > 1]
        if not long:
            return
        node = int(self.rng.choice(long))
        begin, end = self.range[node]
        middle = int(self.rng.integers(begin + 1, end))
        self.parent[node] = self._new(self.parent[node], begin, middle)
        self.range[node] = (middle, end)

    def path(self, node: int) -> list[tuple[int, int, int]]:
        path = []
        while node >= 0:
            path.append((node, *self.range[node]))
            node = self.parent[node]
        return path[::-1]

    def tell(self, mirror: RadixMirror, node: int) -> None:
        """What a reader does: reads upwards from `node` to the first known node."""
        chain = [node]
        while (above := self.parent[chain[-1]]) >= 0 and mirror.end_of(above) < 0:
            chain.append(above)
        chain.reverse()
        leaf = node not in self.parent.values()
        begin, ends = self.range[chain[0]][0], [self.range[link][1] for link in chain]
        mirror.put(self.parent[chain[0]], begin, chain, ends, leaf=leaf)

    def _new(self, parent: int, begin: int, end: int) -> int:
        node, self.next_id = self.next_id, self.next_id + 1
        self.parent[node], self.range[node] = parent, (begin, end)
        return node


@pytest.mark.parametrize("seed", range(60))
def test_mirror_shares_exactly_what_the_tree_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, mirror = RandomTree(rng), RadixMirror()
    last_nodes: list[int] = []
    for _ in range(40):
        action = rng.random()
        if action < 0.45 or not tree.parent:
            last_nodes.append(tree.add())
        elif action < 0.65:
            last_nodes.append(int(rng.choice(list(tree.parent))))
        elif action < 0.85:
            tree.split()
        elif last_nodes:
            last_nodes.pop(int(rng.integers(len(last_nodes))))
        for node in last_nodes:
            if not mirror.known(node):
                tree.tell(mirror, node)
        paths = [tree.path(node) for node in last_nodes]
        last, ends = int64_array(last_nodes), int64_array([path[-1][2] for path in paths])
        forest = mirror.forest(last, ends)
        while stale := mirror.take_stale():
            for node, request in stale:
                assert node in [step[0] for step in tree.path(last_nodes[request])]
                tree.tell(mirror, node)
            forest = mirror.forest(last, ends)
        check_structure(forest)
        for a in range(len(paths)):
            for b in range(a):
                assert shared_positions(forest, a, b) == common_prefix(paths[a], paths[b])


def check_structure(forest: PrefixForest) -> None:
    assert sorted(forest.order.tolist()) == list(range(forest.num_requests))
    for node in range(forest.num_nodes):
        parent = forest.node_parent[node]
        assert parent < node
        assert forest.node_begin[node] == (forest.node_end[parent] if parent >= 0 else 0)
        assert forest.node_end[node] > forest.node_begin[node]
        members = forest.order[forest.node_first[node] : forest.node_last[node]]
        assert len(members) >= 2
        assert forest.node_request[node] in members
        if parent >= 0:
            assert forest.node_first[parent] <= forest.node_first[node]
            assert forest.node_last[node] <= forest.node_last[parent]
            assert len(members) < forest.node_last[parent] - forest.node_first[parent]
    for request in range(forest.num_requests):
        node = forest.tail_node[request]
        assert forest.tail_begin[request] == (forest.node_end[node] if node >= 0 else 0)


def test_a_node_beyond_the_prefix_of_a_request_is_private_to_it() -> None:
    path = [(1, 0, 10), (2, 10, 30)]
    forest = PrefixForest.from_paths([path, path, path], prefix_lens=[30, 29, 30])
    assert forest.node_end.tolist() == [10, 30]
    assert forest.tail_begin.tolist() == [30, 10, 30]


def test_requests_that_are_not_live_share_nothing_and_stand_for_nobody() -> None:
    mirror = RadixMirror()
    mirror.put(-1, 0, [1], [10], leaf=True)
    last, ends = np.ones(3, dtype=np.int64), np.full(3, 10, dtype=np.int64)
    forest = mirror.forest(last, ends, np.array([False, True, True]))
    assert forest.node_request.tolist() == [1]
    assert forest.tail_begin.tolist() == [0, 10, 10]


def test_long_unused_nodes_are_forgotten_and_used_ones_are_not() -> None:
    mirror = RadixMirror()
    mirror.put(-1, 0, [0], [10], leaf=False)
    for node in range(1, 6000):
        mirror.put(0, 10, [node], [20], leaf=True)
    last, ends = np.array([5999, 5999]), np.array([20, 20])
    for _ in range(300):
        forest = mirror.forest(last, ends)
    assert len(mirror) == 2
    assert mirror.known(5999)
    assert mirror.known(0)
    assert not mirror.known(17)
    assert forest.node_end.tolist() == [20]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[(1, 0, 10)], [(2, 5, 9)]], r"request 1, segment 0 \(node 2, \[5, 9\)\): expected a range that starts at 0"),
        ([[(1, 0, 10), (2, 8, 20)]], r"segment 1 .* starts at 10"),
        ([[(1, 0, 0)]], "not empty"),
        ([[(1, 0, -4)]], "not empty"),
        ([[(-1, 0, 4)]], "node ids are not negative"),
        ([[(1, 0, 10)], [(1, 0, 12)]], r"request 1, segment 0 .*another request has this node as \[0, 10\)"),
        ([[(1, 0, 10), (3, 10, 12)], [(2, 0, 10), (3, 10, 12)]], "below node 1"),
    ],
)
def test_bad_paths_are_named(paths: list[list[tuple[int, int, int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixForest.from_paths(paths)


def test_bad_prefix_lens_are_named() -> None:
    with pytest.raises(ValueError, match="2 entries for 1 requests"):
        PrefixForest.from_paths([[(1, 0, 10)]], prefix_lens=[1, 2])
    with pytest.raises(ValueError, match="request 0: prefix length -3 is negative"):
        PrefixForest.from_paths([[(1, 0, 10)]], prefix_lens=[-3])


def test_mirror_refuses_what_cannot_be() -> None:
    mirror = RadixMirror()
    with pytest.raises(ValueError, match="unknown parent 4"):
        mirror.put(4, 10, [5], [12], leaf=True)
    with pytest.raises(ValueError, match="no range"):
        mirror.put(-1, 0, [5, 6], [3, 3], leaf=True)
    with pytest.raises(ValueError, match="begins at 3, but its parent ends at 0"):
        mirror.put(-1, 3, [5], [4], leaf=True)
    with pytest.raises(ValueError, match="radix node 5: ends at 4, but was known to end at 3"):
        mirror.put(-1, 0, [5], [4], leaf=True)
    with pytest.raises(ValueError, match="a branch of 2 nodes with 1 ends"):
        mirror.put(-1, 0, [7, 8], [3], leaf=True)
    with pytest.raises(ValueError, match="request 0: unknown radix node 9"):
        mirror.forest(np.array([9]), np.array([4]))
    with pytest.raises(ValueError, match="prefix_lens must have one entry"):
        mirror.forest(np.array([-1]), np.array([4, 4]))


def test_views_are_read_only_and_outlive_the_forest() -> None:
    order = PrefixForest.from_paths([[(1, 0, 10)], [(1, 0, 10)]]).order
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 3
    assert order.tolist() == [0, 1]


def test_empty_batch() -> None:
    forest = PrefixForest.from_paths([])
    assert (forest.num_requests, forest.num_nodes) == (0, 0)
