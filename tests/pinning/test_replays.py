"""Retention over a replay of conversations saves nearly what looking ahead can save."""

from __future__ import annotations

import random

import pytest

from benchmarks.cache import blocks
from benchmarks.cache.trace import Prompt

POOL = 60


def conversations(requests: int, seed: int = 1) -> list[Prompt]:
    """Conversations that go on after 15 to 30 other requests, among prompts that nobody asks again."""
    dice = random.Random(seed)
    number = 1
    due: dict[int, tuple[int, ...]] = {}
    prompts = []
    for now in range(requests):
        before = due.pop(now, (0,))
        goes_on = len(before) > 1 or dice.random() < 0.1
        new = dice.randint(1, 6)
        asked = (*before, *range(number, number + new))
        number += new
        prompts.append(Prompt(asked, len(asked) - 1))
        if goes_on and len(asked) < 30:
            due[now + dice.randint(15, 30)] = asked[:-1]
    return prompts


@pytest.mark.parametrize("lookahead", [8, 64])
def test_ours_with_a_queue_saves_what_the_limit_does(lookahead: int) -> None:
    prompts = conversations(1500)
    assert blocks.ours(prompts, POOL, lookahead) >= 0.95 * blocks.limit(prompts, POOL, lookahead)
