"""The verdict over simulated tests: false alarms, found differences, wrong winners."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sgl_prefix_attn.abtest.statistics import CopySteps, Floats, Verdict, judge, lines_of
from sgl_prefix_attn.routing.live_plan import LivePlan

TESTS = 400


def noise(rng: np.random.Generator, steps: int) -> Floats:
    """Factors on step times: drift over the test, autocorrelated noise of 5 %, bursts of some steps."""
    drift = 1 + 0.2 * np.sin(np.linspace(0, rng.uniform(1, 6), steps) + rng.uniform(0, 6))
    shocks = np.convolve(rng.normal(0, 0.05 * math.sqrt(1 - 0.8**2), steps), 0.8 ** np.arange(40))[:steps]
    bursts = np.ones(steps)
    for start in rng.integers(steps, size=steps // 200):
        bursts[start : start + int(rng.integers(1, 12))] *= rng.uniform(1.5, 4)
    return drift * np.exp(shocks) * bursts


def verdict(seed: int, b_over_a: float, pairs: int = 150) -> Verdict:
    rng = np.random.default_rng(seed)
    plan = LivePlan(arms=("cost", "batch>=64"), block_steps=24, warmup_steps=4, pairs=pairs, seed=seed)
    arm = np.repeat(plan.order(), plan.block_steps)
    requests = 64.0 + np.round(8 * np.sin(np.arange(plan.steps) / 400))
    us = 9000 * noise(rng, plan.steps) * np.where(arm == 1, b_over_a, 1.0)
    us[rng.random(plan.steps) < 0.02] = np.nan
    return judge(plan, [CopySteps(us, requests, np.zeros(plan.steps))])


def test_equal_arms_show_no_difference() -> None:
    winners = [verdict(seed, 1.0).winner for seed in range(TESTS)]
    assert winners.count(None) >= 0.93 * TESTS


@pytest.mark.parametrize(("b_over_a", "better"), [(1.03, "A"), (1 / 1.03, "B")])
def test_three_percent_are_found(b_over_a: float, better: str) -> None:
    winners = [verdict(seed, b_over_a).winner for seed in range(TESTS // 2)]
    assert winners.count(better) >= 0.8 * len(winners)
    assert sum(winner not in (better, None) for winner in winners) <= 0.01 * len(winners)


def test_the_number_of_steps_that_a_difference_needs_is_enough() -> None:
    small = verdict(1, 1.0, pairs=60)
    assert small.winner is None
    assert small.steps_needed is not None
    pairs = math.ceil(small.steps_needed / 48)
    found = [verdict(seed, 1.01, pairs).winner == "A" for seed in range(40)]
    assert sum(found) >= 0.6 * len(found)
    assert "No difference seen at this size" in small.sentence()
    assert "A difference of 1.0% needs about" in "\n".join(lines_of(small))


def test_blocks_of_unlike_batches_are_not_compared() -> None:
    plan = LivePlan(arms=("cost", "packed"), block_steps=8, warmup_steps=2, pairs=20)
    requests = np.repeat(np.where(np.arange(40) % 4 == 1, 90.0, 60.0), 8)  # every other pair has one larger batch
    found = judge(plan, [CopySteps(100 * requests, requests, np.zeros(plan.steps))])
    assert (found.pairs, found.dropped, found.winner) == (10, 10, None)
    few = judge(plan, [CopySteps(np.full(40, 5.0), np.ones(40), np.ones(40))])
    assert (few.pairs, few.winner, few.steps_needed) == (2, None, None)
    assert "At least 8 pairs are needed" in few.sentence()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arms": ("cost", "batch<3")}, "'batch<3' is not a routing policy"),
        ({"block_steps": 8, "warmup_steps": 8}, "fewer than block_steps 8 are needed"),
        ({"pairs": 10_000, "block_steps": 64}, "at most 100000 are accepted"),
        ({"lease_steps": 10**6}, "less than or equal to 20000"),
    ],
)
def test_plans_are_bounded(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LivePlan.model_validate({"arms": ("cost", "packed"), **fields})
