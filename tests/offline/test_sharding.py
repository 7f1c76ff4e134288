"""Engines get about equal work; only a group of more than a fair share is split, and then where it costs least."""

from __future__ import annotations

import numpy as np
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


def test_a_large_group_is_cut_between_the_groups_below_its_prefix():
    # All share 300 tokens, each of six documents another 200, and each question stands alone.
    prompts = [[7] * 300 + [100 + d] * 200 + [1000 + 30 * d + q] * 5 for d in range(6) for q in range(30)]
    tree = PrefixTree(Prompts.from_lists(prompts))
    one_group = np.zeros(len(prompts), dtype=np.int64)
    parts = shards(tree, np.ones(len(prompts)), 3, one_group)
    assert [len(part) for part in parts] == [60, 60, 60]
    for part in parts:
        assert len({number // 30 for number in part.tolist()}) == 2


def test_a_group_whose_prefix_is_nearly_all_of_it_stays_whole():
    # Half of the rest of 40 tokens on another engine would cost that engine 1000.
    _, parts = sharded([*with_prefix(1000, 4, 10, 1000), [9] * 800], 2)
    assert sorted(map(len, parts)) == [1, 4]
