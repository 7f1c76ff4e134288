"""What hints keep: within the budget, which namespaces share, until it ends."""

from __future__ import annotations

import math
import random

from sgl_prefix_attn.pinning import CachedTree, NodeSpan, RetentionScores
from sgl_prefix_attn.pinning.cached_tree import Use
from sgl_prefix_attn.pinning.retained import RetainedPrefixes


def kept(budget: int) -> RetainedPrefixes:
    return RetainedPrefixes(budget, lambda key: None)


def test_a_kept_prefix_has_the_highest_priority_of_its_hints() -> None:
    hints = kept(10)
    hints.keep([1, 2, 3], 5, math.inf, None)
    hints.keep([1, 2], 9, 4.0, None)
    assert [hints.priority(key) for key in (1, 2, 3, 4)] == [9, 9, 5, 0]
    hints.expire(4.0)
    assert [hints.priority(key) for key in (1, 2, 3)] == [5, 5, 5]
    hints.give_up([2])
    assert len(hints) == 3
    hints.give_up([1, 2, 3])
    assert (len(hints), hints._stored, hints._held) == (0, {}, {})


def test_a_hint_only_raises() -> None:
    hints = kept(10)
    hints.keep([1, 2], 9, 100.0, None)
    hints.keep([1, 2], 1, 5.0, None)
    hints.expire(50.0)
    assert hints.priority(2) == 9


def test_only_keys_whose_priority_changes_are_told() -> None:
    """Many prefixes begin with one system prompt; a scheduler must not sort it anew for each of them."""
    told: list[int] = []
    hints = RetainedPrefixes(1000, told.append)
    for number, changed in ((10, [1, 2, 10]), (11, [11]), (12, [12])):
        hints.keep([1, 2, number], 5, math.inf, None)
        assert told == changed
        told.clear()
    hints.keep([1, 2, 13], 6, 4.0, None)
    hints.give_up([10])
    assert told == [1, 2, 13, 10]
    told.clear()
    hints.expire(4.0)
    assert told == [1, 2, 13]
    assert [hints.priority(key) for key in (1, 2, 10, 13)] == [5, 5, 0, 0]


def test_turns_of_a_conversation_do_not_add_up() -> None:
    hints = kept(1000)
    for turn in range(1, 100):
        hints.keep(list(range(10 * turn)), 5, math.inf, None)
    assert (len(hints), len(hints._entries)) == (990, 1)


def test_the_namespace_that_holds_the_most_loses_first() -> None:
    hints = kept(10)
    hints.keep([1, 2, 3], 1, math.inf, "b")
    for first in range(100, 200, 10):
        hints.keep(list(range(first, first + 4)), 100, math.inf, "a")
        assert len(hints) <= 10
    assert hints.priority(3) == 1


def test_the_budget_and_the_books_hold_at_random() -> None:
    dice = random.Random(5)
    hints = kept(40)
    for step in range(3000):
        path = [dice.randint(0, 3) for _ in range(dice.randint(1, 60))]
        keys = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        if dice.random() < 0.7:
            expires = dice.choice([math.inf, step + dice.random() * 50])
            hints.keep(keys, dice.randint(1, 100), expires, dice.choice([None, "a", "b"]))
        elif dice.random() < 0.5:
            hints.give_up(keys)
        hints.expire(step)
        assert len(hints) <= 40
        assert sum(hints._stored.values()) == sum(len(entry.keys) for entry in hints._entries.values()) <= 160
        assert set(hints._held) == {key for entry in hints._entries.values() for key in entry.keys}
        assert len(hints._ends) <= 2 * len(hints._entries) + 65
    hints.clear()
    assert len(hints) == 0


def test_scores_of_kept_prefixes_are_no_lower_than_without_the_hint() -> None:
    scores = RetentionScores(max_retained=10)
    scores.announce([1], uses=1)
    scores.announce([2], uses=3)
    scores.lookahead.add("request", [3])
    before = {key: scores.of(key) for key in (1, 2, 3, 4)}
    scores.retain([1, 2, 3, 4], 1, math.inf, None)
    assert all(scores.of(key) >= before[key] for key in before)
    assert scores.of(4) > 1


def test_a_superseded_node_goes_first_until_it_is_used_and_only_if_one_owner_used_it() -> None:
    tree = CachedTree(4, RetentionScores())
    tree.used([NodeSpan("a", 1, 0, 8), NodeSpan("b", 2, 8, 12, True)], [], use=Use("x", 0))
    tree.used([NodeSpan("c", 3, 0, 8, True)], [], use=Use("y", 0))
    tree.used([NodeSpan("a", 1, 0, 8), NodeSpan("d", 4, 8, 12, True)], [], use=Use("y", 8))
    assert tree.supersede(2, "y", 0) == 0
    assert tree.supersede(2, "x", 0) == 4  # the upper node is used by both
    assert [node.id for node in tree.select_victims(100, below=0.0)] == [2]
    tree.used([NodeSpan("a", 1, 0, 8), NodeSpan("b", 2, 8, 12, True)], [], use=Use("y", 12))
    assert tree.select_victims(100, below=0.0) == []
    assert tree.supersede(2, "x", 0) == 0


def test_what_a_request_found_in_the_cache_has_no_owner() -> None:
    tree = CachedTree(4, RetentionScores())
    tree.used([NodeSpan("a", 1, 0, 8), NodeSpan("b", 2, 8, 12, True)], [], use=Use("x", 8))
    assert tree.supersede(2, "x", 0) == 4


def test_a_split_keeps_whose_the_node_is_and_when_it_was_used() -> None:
    tree = CachedTree(4, RetentionScores())
    tree.used([NodeSpan("a", 1, 0, 16, True)], [], use=Use("x", 0))
    tree.used([NodeSpan("b", 2, 0, 4, True)], [], use=Use("x", 0))
    assert tree.seen([NodeSpan("c", 3, 0, 8)], []) == [1]
    tree.place([NodeSpan("c", 3, 0, 8), NodeSpan("a", 1, 8, 16, True)])
    node = tree.get(3)
    assert node is not None
    assert (node.owner, node.last_use, tree.tokens) == ("x", 1, 20)
    assert tree.supersede(1, "x", 8) == 8
