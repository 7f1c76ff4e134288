"""Engines get about equal work; only a group of more than a fair share is split, and then where it costs least."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.sharding import shards

BATCHES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20)
DECODE = 1.0


def sharded(prompts: list[list[int]], engines: int) -> tuple[PrefixTree, list[list[int]]]:
    tree = PrefixTree(Prompts.from_lists(prompts))
    return tree, [part.tolist() for part in shards(tree, np.full(len(prompts), DECODE), engines)]


def work(tree: PrefixTree, part: list[int]) -> float:
    """What an engine has to do: each token that its prompts share once, and their output."""
    return tree.restricted(np.array(part, dtype=np.int64)).unique_tokens + DECODE * len(part)


@settings(max_examples=300, deadline=None)
@given(BATCHES, st.integers(1, 5))
def test_every_prompt_once_and_no_group_within_a_fair_share_is_split(prompts, engines):
    tree, parts = sharded(prompts, engines)
    assert len(parts) == engines
    assert sorted(number for part in parts for number in part) == list(range(len(prompts)))
    fair = work(tree, list(range(len(prompts)))) / engines
    group_of = tree.enlarged_first_level()
    for group in set(group_of.tolist()) - {-1}:
        members = set(np.flatnonzero(group_of == group).tolist())
        if work(tree, sorted(members)) <= fair:
            assert sum(bool(members & set(part)) for part in parts) == 1


def with_prefix(tokens: int, members: int, own: int, start: int) -> list[list[int]]:
    return [[7] * tokens + [start + number] * own for number in range(members)]


@pytest.mark.parametrize("engines", [2, 3, 7])
def test_one_prefix_for_all_is_computed_once_on_each_engine(engines):
    _, parts = sharded(with_prefix(500, 210, 30, 1000), engines)
    assert {len(part) for part in parts} == {210 // engines}


def test_a_large_group_is_cut_between_the_groups_below_its_prefix():
    # All share 300 tokens, each of six documents another 200, and each question stands alone.
    prompts = [[7] * 300 + [100 + d] * 200 + [1000 + 30 * d + q] * 5 for d in range(6) for q in range(30)]
    tree = PrefixTree(Prompts.from_lists(prompts))
    one_group = np.zeros(len(prompts), dtype=np.int64)
    parts = shards(tree, np.ones(len(prompts)), 3, one_group)
    assert [len(part) for part in parts] == [60, 60, 60]
    for part in parts:
        assert len({number // 30 for number in part.tolist()}) == 2


def test_other_groups_fill_up_the_engine_where_the_large_one_ends():
    large = with_prefix(50, 90, 10, 1000)
    others = [[200 + group] * 60 + [5000 + 2 * group + n] * 20 for group in range(4) for n in range(2)]
    tree, parts = sharded(large + others, 2)
    first, second = (work(tree, part) for part in parts)
    assert abs(first - second) <= 60
    assert first + second <= work(tree, list(range(len(tree.prompts)))) + 50
    for group in range(4):
        members = {90 + 2 * group, 91 + 2 * group}
        assert sum(bool(members & set(part)) for part in parts) == 1


def test_a_group_whose_prefix_is_nearly_all_of_it_stays_whole():
    # Half of the rest of 40 tokens on another engine would cost that engine 1000.
    _, parts = sharded([*with_prefix(1000, 4, 10, 1000), [9] * 800], 2)
    assert sorted(map(len, parts)) == [1, 4]


def test_a_group_of_others_between_two_members_bounds_what_they_have_in_common():
    prompts = [[1, 1, 1, 5], [1, 1, 1, 6], [1, 2, 1, 5], [1, 2, 1, 6], [3] * 4, [3] * 4]
    tree = PrefixTree(Prompts.from_lists(prompts))
    parts = shards(tree, np.ones(6), 2, np.array([0, 0, 1, 1, 0, 0]))
    assert sorted(number for part in parts for number in part.tolist()) == list(range(6))
