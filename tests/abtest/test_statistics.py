"""The verdict over simulated tests: false alarms, found differences, wrong winners."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from sgl_prefix_attn.abtest.statistics import CopySteps, judge, lines_of
from sgl_prefix_attn.routing.live_plan import LivePlan
from tests.abtest.simulated import Steps, shares, simulate

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TESTS = 60  # benchmarks/results/abtest_simulated.json is of 400


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps.read("judge")


def test_equal_arms_show_no_difference(steps: Steps) -> None:
    assert shares(steps, TESTS, seed=1, b_over_a=1.0)["none"] >= 0.93


@pytest.mark.parametrize(("b_over_a", "better", "worse"), [(1.03, "A", "B"), (1 / 1.03, "B", "A")])
def test_three_percent_are_found(b_over_a: float, better: str, worse: str, steps: Steps) -> None:
    found = shares(steps, TESTS // 2, seed=2, b_over_a=b_over_a)
    assert found[better] >= 0.8
    assert found[worse] <= 0.01


def test_the_number_of_steps_that_a_difference_needs_is_enough(steps: Steps) -> None:
    small = simulate(steps, 1, 1.0, pairs=100)
    assert small.winner is None
    assert "No difference seen at this size" in small.sentence()
    assert "A difference of 1.0% needs about" in "\n".join(lines_of(small))
    needed = [simulate(steps, seed, 1.0, pairs=100).pairs_needed or 0 for seed in range(20)]
    effect = 0.01 * math.sqrt(float(np.median(needed)) / 400)  # seen with 400 pairs
    found = [simulate(steps, seed, 1 + effect, pairs=400).winner == "A" for seed in range(30)]
    assert sum(found) >= 0.6 * len(found)


def test_blocks_of_unlike_batches_are_not_compared() -> None:
    plan = LivePlan(arms=("auto", "packed"), block_steps=8, warmup_steps=2, pairs=20)
    requests = np.repeat(np.where(np.arange(40) % 4 == 1, 90.0, 60.0), 8)  # every other pair has one larger batch
    found = judge(plan, [CopySteps(100 * requests, requests, np.zeros(plan.steps))])
    assert (found.pairs, found.dropped, found.winner) == (10, 10, None)
    few = judge(plan, [CopySteps(np.full(40, 5.0), np.ones(40), np.ones(40))])
    assert (few.pairs, few.winner, few.steps_needed) == (2, None, None)
    assert few.sentence() == "No difference seen at this size: 2 pairs of blocks. At least 8 pairs are needed."
    idle = judge(plan, [CopySteps(np.empty(0), np.empty(0), np.empty(0))])
    assert idle.sentence() == "The server ran no decode step meanwhile: a live test needs requests."
    assert json.loads(json.dumps(idle.as_json(), allow_nan=False))["low"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arms": ("auto", "batch<3")}, "'batch<3' is not a routing policy"),
        ({"block_steps": 8, "warmup_steps": 8}, "fewer than block_steps 8 are needed"),
        ({"pairs": 10_000, "block_steps": 64}, "at most 100000 are accepted"),
        ({"lease_steps": 10**6}, "less than or equal to 20000"),
    ],
)
def test_plans_are_bounded(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LivePlan.model_validate({"arms": ("auto", "packed"), **fields})
