"""Groups run together, those with much decoding per prefill token first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.offline.group_order import GroupOrder
from sgl_prefix_attn.offline.output_lengths import OutputLengths
from sgl_prefix_attn.offline.prefix_tree import PrefixTree, consecutive_sharing
from sgl_prefix_attn.offline.prompts import Prompts

BATCHES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20)


def order_of(prompts: list[list[int]], decode: list[float] | None = None) -> list[int]:
    tree = PrefixTree(Prompts.from_lists(prompts))
    return list(GroupOrder(tree, np.array(decode or [1.0] * len(prompts))))


@settings(max_examples=200, deadline=None)
@given(BATCHES, st.data())
def test_every_prompt_once_and_each_shared_token_next_to_another_user_whatever_the_estimates_do(prompts, data):
    tree = PrefixTree(Prompts.from_lists(prompts))
    order = GroupOrder(tree, np.ones(len(prompts)))
    sequence = []
    for number in order:
        sequence.append(number)
        if data.draw(st.booleans()):
            order.update(np.array([data.draw(st.floats(0, 100)) for _ in prompts]))
    assert sorted(sequence) == list(range(len(prompts)))
    assert int(consecutive_sharing(tree.prompts, np.array(sequence, dtype=np.int64)).sum()) == int(tree.shared.sum())


def groups(*sizes: tuple[int, int, int]) -> list[list[int]]:
    """Prompts of groups given as (prefix tokens, members, own tokens)."""
    own = itertools.count(1000)
    return [
        [100 + group] * prefix + [next(own)] * tail
        for group, (prefix, members, tail) in enumerate(sizes)
        for _ in range(members)
    ]


@pytest.mark.parametrize(
    ("prompts", "decode", "expected"),
    [
        # Equation 4 with a constant output: a group's ratio is 1 / (prefix + sum of the distinct parts).
        (groups((50, 2, 5), (10, 2, 5), (30, 2, 5)), None, [2, 3, 4, 5, 0, 1]),
        (groups((20, 2, 5), (20, 2, 5), (20, 2, 5)), [5, 5, 50, 50, 20, 20], [2, 3, 4, 5, 0, 1]),
        # 40 + 4 x 5 = 60 prefill tokens for 4 outputs come before 25 for one: a prefix counts once.
        (groups((40, 4, 5), (25, 1, 0)), None, [0, 1, 2, 3, 4]),
        ([[7] * 10 + [1] * 9, [7] * 10 + [2] * 3, [7] * 10 + [3] * 6], None, [1, 2, 0]),
    ],
    ids=["short prefills", "much decoding", "prefix once", "members"],
)
def test_most_decoding_per_prefill_token_comes_first(prompts, decode, expected):
    assert order_of(prompts, decode) == expected


def test_new_estimates_reorder_what_is_left_but_keep_the_open_group_together():
    prompts = groups((10, 3, 2), (20, 2, 2), (30, 2, 2))
    order = GroupOrder(PrefixTree(Prompts.from_lists(prompts)), np.ones(7))
    started = [next(order)]
    order.update(np.array([1.0, 1, 1, 1, 1, 900, 900]))
    assert started + list(order) == [0, 1, 2, 5, 6, 3, 4]


def test_estimates_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="decode_tokens has 3 entries for 2 prompts"):
        order_of([[1], [2]], [1.0, 1.0, 1.0])


def test_output_lengths_start_at_the_limit_and_learn_by_kind():
    lengths = OutputLengths(np.array([100, 100, 1000, 1000]))
    assert lengths.estimates().tolist() == [100, 100, 1000, 1000]
    for _ in range(50):
        lengths.learn(0, 10)
    assert lengths.version > 0
    first, other = lengths.estimates()[1], lengths.estimates()[2]
    assert 10 <= first < 15
    assert 100 <= other < 150  # nothing of that kind has finished, but the others used a tenth of their limit
    for _ in range(50):
        lengths.learn(3, 800)
    assert 700 < lengths.estimates()[2] <= 800
    assert 10 <= lengths.estimates()[0] < 40


def test_limits_that_are_what_prompts_leave_of_the_context_are_few_kinds():
    random = np.random.default_rng(5)
    limits = 8192 - random.integers(1, 4000, 5000)  # nearly all of them different
    lengths = OutputLengths(limits)
    for request in range(5000):
        lengths.learn(request, int(random.integers(1, 400)))
    assert lengths.version < 60  # for each the queue is put in order again
    assert (np.abs(lengths.estimates() - 200) < 40).all()


def test_impossible_output_lengths_are_named():
    with pytest.raises(ValueError, match="request 1: limit 5, minimum 6"):
        OutputLengths(np.array([5, 5]), np.array([0, 6]))
