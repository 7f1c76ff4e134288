"""The tree of cached nodes: splits are followed, and victims are the leaves of the lowest score."""

from __future__ import annotations

import random
from collections.abc import Callable

from sgl_prefix_attn.pinning import CachedNode, CachedTree, Lookahead, NodeSpan, RetentionScores, ReuseMemory
from sgl_prefix_attn.pinning.retention_score import FINISHED_SCORE


def span(node_id: int, begin: int, end: int, *, leaf: bool = False) -> NodeSpan:
    return NodeSpan(f"handle {node_id}", node_id, begin, end, leaf)


def ids(nodes: list[CachedNode]) -> list[int]:
    return [node.id for node in nodes]


def test_a_leaf_in_use_stays_with_its_parent_until_it_is_checked_again() -> None:
    tree = CachedTree(4, RetentionScores())
    tree.used([span(1, 0, 8), span(2, 8, 12, leaf=True)], [])
    assert tree.select_victims(100, lambda node: node.id == 2) == []
    assert tree.select_victims(100) == []
    tree.recheck(1, lambda node: True)
    assert tree.select_victims(100) == []
    tree.recheck(1, lambda node: False)
    assert ids(tree.select_victims(100)) == [2, 1]


def test_a_split_is_followed() -> None:
    tree = CachedTree(4, RetentionScores())
    tree.used([span(1, 0, 16, leaf=True)], [10, 11, 12, 13])
    assert tree.used([span(5, 0, 8), span(6, 8, 10, leaf=True)], [10, 11]) == [1]
    assert tree.place([span(5, 0, 8), span(1, 8, 16, leaf=True)]) == []
    node = tree.get(1)
    assert (node.parent, node.tokens, node.key) == (5, 8, 12)
    assert sorted(ids(tree.leaves())) == [1, 6]
    assert tree.tokens == 18


def test_after_a_split_only_nodes_that_begin_with_the_same_tokens_are_looked_at() -> None:
    tree = CachedTree(4, RetentionScores(), lambda prompt, begin: prompt[begin])
    for node_id in range(1000):
        tree.used([span(node_id, 0, 16, leaf=True)], [], [node_id] * 16)
    assert tree.used([span(2000, 0, 8), span(2001, 8, 12, leaf=True)], [], [7] * 8 + [8] * 4) == [7]


def test_a_remainder_shorter_than_a_block_has_no_key() -> None:
    tree = CachedTree(4, RetentionScores())
    tree.used([span(1, 0, 4), span(2, 4, 6, leaf=True)], [10])
    assert [leaf.key for leaf in tree.leaves()] == [None]


def test_all_leaves_are_visited_in_turn() -> None:
    tree = CachedTree(4, RetentionScores())
    for node_id in range(5):
        tree.used([span(node_id, 0, 4, leaf=True)], [])
    assert [ids(tree.next_leaves(3)) for _ in range(2)] == [[0, 1, 2], [3, 4, 0]]


class RandomTree:
    """Random branches below shared prefixes, uses, queues and groups; victims compared with a full sort."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.scores = RetentionScores(ReuseMemory(max_keys=60, horizon=64), Lookahead(6))
        self.tree = CachedTree(1, self.scores)
        self.numbers = iter(range(1 << 30))
        self.queue: list[tuple[int, list[int]]] = []

    def keys(self) -> list[int]:
        """Keys 1, 1x, 1xy: equal keys have equal prefixes."""
        root = self.dice.randint(1, 4)
        middle = root * 10 + self.dice.randint(0, 3)
        return [root, middle, middle * 10 + self.dice.randint(0, 9)]

    def use(self, keys: list[int], request: int) -> None:
        self.scores.scheduled(request, keys, keys if self.dice.random() < 0.7 else ())
        path = [span(key, depth, depth + 1, leaf=depth == 2) for depth, key in enumerate(keys)]
        self.tree.used(path, keys)

    def act(self) -> None:
        dice = self.dice
        action = dice.random()
        if action < 0.5:
            self.use(self.keys(), next(self.numbers))
        elif action < 0.7:
            self.queue.append((next(self.numbers), self.keys()))
            self.follow()
        elif action < 0.85 and self.queue:
            number, keys = self.queue.pop(0)
            self.use(keys, number)
        elif action < 0.9:
            self.scores.announce(self.keys()[: dice.randint(1, 3)], dice.randint(1, 2))
        elif action < 0.93:
            dice.shuffle(self.queue)
            self.follow()
        else:
            for node in self.tree.select_victims(dice.randint(1, 6)):
                self.tree.drop(node.id)

    def follow(self) -> None:
        self.scores.follow([number for number, _ in self.queue], dict(self.queue).__getitem__)

    def score(self, node: CachedNode) -> float:
        path: CachedNode | None = node
        while path is not None:
            if self.scores.of(path.key) < 0:
                return FINISHED_SCORE
            path = self.tree.get(path.parent)
        return self.scores.of(node.key)

    def expected(self, tokens: int, score: Callable[[CachedNode], float]) -> list[float]:
        """Scores of the victims, the slow way."""
        leaves = {leaf.id for leaf in self.tree.leaves()}
        gone: set[int] = set()
        found = []
        while leaves and len(found) < tokens:
            node = min((self.tree._nodes[i] for i in leaves), key=lambda n: (score(n), n.last_use, -n.begin, n.id))
            leaves.discard(node.id)
            gone.add(node.id)
            found.append(score(node))
            parent = self.tree.get(node.parent)
            if parent is not None and set(parent.children) <= gone:
                leaves.add(parent.id)
        return found


def test_victims_have_the_lowest_scores_whatever_happened_before() -> None:
    for seed in range(12):
        case = RandomTree(seed)
        for _ in range(100):
            case.act()
            victims = case.tree.select_victims(5)
            assert [case.score(node) for node in victims] == case.expected(5, case.score), seed
            by_use = case.tree.select_victims(5, by_use=True)
            assert len(by_use) == min(5, len(case.tree)), seed
            last_uses = [node.last_use for node in by_use if not node.children]
            assert last_uses == sorted(last_uses), seed
