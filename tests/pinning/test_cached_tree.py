"""The tree of cached nodes: leaves go first, splits are followed, the least worth goes before the rest."""

from __future__ import annotations

from sgl_prefix_attn.pinning import CachedTree, Stretch


def stretch(node_id: int, begin: int, end: int, *, leaf: bool = False) -> Stretch:
    return Stretch(f"handle {node_id}", node_id, begin, end, leaf)


def worthless(key: int | None) -> float:
    return 0.0


def test_least_recently_used_leaves_go_first_and_then_what_is_above_them() -> None:
    tree = CachedTree(block=4)
    tree.used([stretch(1, 0, 8), stretch(2, 8, 12, leaf=True)], [])
    tree.used([stretch(1, 0, 8), stretch(3, 8, 20, leaf=True)], [])
    assert [node.id for node in tree.give_up(1, worthless)] == [2]
    assert [node.id for node in tree.give_up(17, worthless)] == [2, 3, 1]
    assert len(tree) == 3


def test_worth_comes_before_recency() -> None:
    tree = CachedTree(block=4)
    tree.used([stretch(1, 0, 4, leaf=True)], [10])
    tree.used([stretch(2, 0, 4, leaf=True)], [20])
    assert [node.id for node in tree.give_up(4, lambda key: 1.0 if key == 10 else 0.5)] == [2]


def test_what_cannot_go_keeps_what_is_above_it() -> None:
    tree = CachedTree(block=4)
    tree.used([stretch(1, 0, 8), stretch(2, 8, 12, leaf=True)], [])
    assert tree.give_up(100, worthless, keep=lambda node: node.id == 2) == []


def test_a_split_is_suspected_and_followed() -> None:
    tree = CachedTree(block=4)
    tree.used([stretch(1, 0, 16, leaf=True)], [10, 11, 12, 13])
    suspects = tree.used([stretch(5, 0, 8), stretch(6, 8, 10, leaf=True)], [10, 11])
    assert suspects == [1]
    assert tree.place([stretch(5, 0, 8), stretch(1, 8, 16, leaf=True)]) == []
    node = tree.get(1)
    assert node is not None
    assert (node.parent, node.tokens, tree.key(node)) == (5, 8, 12)
    assert sorted(leaf.id for leaf in tree.leaves()) == [1, 6]
    assert tree.tokens == 18


def test_a_dropped_leaf_makes_its_parent_a_leaf() -> None:
    tree = CachedTree(block=4)
    tree.used([stretch(1, 0, 8), stretch(2, 8, 12, leaf=True)], [])
    tree.drop(2)
    assert [leaf.id for leaf in tree.leaves()] == [1]
    tree.drop(1)
    assert len(tree) == 0


def test_a_remainder_shorter_than_a_block_has_no_key() -> None:
    tree = CachedTree(block=4)
    tree.used([stretch(1, 0, 4), stretch(2, 4, 6, leaf=True)], [10])
    assert [tree.key(leaf) for leaf in tree.leaves()] == [None]


def test_nothing_below_a_spent_prefix_is_worth_more_than_it() -> None:
    tree = CachedTree(block=4)
    tree.used([stretch(1, 0, 4, leaf=True)], [10])
    tree.used([stretch(2, 0, 4), stretch(3, 4, 8, leaf=True)], [20, 21])
    spent = {20: -1.0, 10: 0.5, 21: 0.9}
    assert [node.id for node in tree.give_up(8, lambda key: spent.get(key or 0, 0.0), spent=True)] == [3, 2]
