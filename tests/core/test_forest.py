"""PrefixForest and RadixMirror. Random histories of the mirror: sglang_plugin/prefix/test_random_history.py."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest, RadixMirror


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
    mirror.put(-1, 0, [6000], [5], leaf=True)  # when it goes, all others move
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
        ([[(1, 0, 2**31)]], r"segment 0 .*: expected an end of at most 2\^31 - 1"),
        ([[(2**63, 0, 4)]], r"expected a node id from 0 to 2\^63 - 1"),
        ([[(-1, 0, 4)]], r"expected a node id from 0 to 2\^63 - 1"),
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


def test_a_node_may_be_below_any_of_several_new_nodes() -> None:
    mirror = RadixMirror()
    mirror.put(-1, 0, [1], [80], leaf=True)
    mirror.put(-1, 0, [2], [50], leaf=False)
    mirror.put(-1, 0, [3], [100], leaf=False)  # ends behind the first, which can be below the second alone
    mirror.forest(np.array([1]), np.array([80]))
    assert mirror.take_stale() == [(1, 0)]


def test_a_refused_forest_leaves_no_counts_behind() -> None:
    mirror = RadixMirror()
    mirror.put(-1, 0, [1, 2], [3, 5], leaf=True)
    with pytest.raises(ValueError, match="unknown radix node 9"):
        mirror.forest(np.array([2, 9]), np.array([5, 5]))
    assert len(mirror) == 0
    mirror.put(-1, 0, [1, 2], [3, 5], leaf=True)
    assert mirror.forest(np.array([2, 1]), np.array([5, 3])).node_end.tolist() == [3]


def test_views_are_read_only_and_outlive_the_forest() -> None:
    order = PrefixForest.from_paths([[(1, 0, 10)], [(1, 0, 10)]]).order
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 3
    assert order.tolist() == [0, 1]


def test_empty_batch() -> None:
    forest = PrefixForest.from_paths([])
    assert (forest.num_requests, forest.num_nodes) == (0, 0)
