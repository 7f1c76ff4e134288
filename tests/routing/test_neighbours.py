"""Measured steps correct the predicted ratio near themselves, and nowhere else."""

from __future__ import annotations

import dataclasses
import math
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.neighbours import ERROR_OF_FEW, FARTHEST, MOST_STEPS, NEAREST, Neighbours
from sgl_prefix_attn.routing.policy import CostPolicy, Route, cost_policy
from sgl_prefix_attn.routing.profile import Fit, MeasuredStep, load_profile
from tests.routing.profiles import profile

SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
MADE = profile({"launch": 100.0}, {"launch": 120.0})
STEP = StepFeatures(64, 80_000, 40_000, 45_000, 4, 64, 4_000, 2_000)


def steps(count: int) -> list[StepFeatures]:
    """Steps of many sizes, the first of them STEP."""
    return [
        dataclasses.replace(STEP, requests=64 + 3 * i, tokens=80_000 + 7_000 * i, linked_tokens=45_000 + 3_000 * i)
        for i in range(count)
    ]


class TestNeighbours:
    def test_an_error_is_that_of_the_same_step_and_fades_with_distance(self) -> None:
        found = Neighbours([STEP], np.array([0.1]), np.array([0.3]))
        same, deviation = found.error(STEP, 0.1)
        assert 0.15 < same < 0.2
        assert deviation < 0.05
        far = dataclasses.replace(STEP, requests=2, tokens=400_000, unique_tokens=399_000, longest_request=390_000)
        assert found.error(far, 0.1) == pytest.approx((0.0, ERROR_OF_FEW), abs=1e-3)

    @pytest.mark.parametrize("predicted", [NEAREST, FARTHEST, 3.0, -3.0])
    def test_clear_predictions_stand(self, predicted: float) -> None:
        assert Neighbours([STEP], np.array([0.1]), np.array([0.3])).error(STEP, predicted) == (0.0, 0.0)

    def test_without_measured_steps_near_the_border_nothing_is_known(self) -> None:
        assert Neighbours([STEP], np.array([2.0]), np.array([2.1])).error(STEP, 0.0) == (0.0, ERROR_OF_FEW)

    def test_a_step_without_requests_has_an_error_too(self) -> None:
        found = Neighbours(steps(3), np.zeros(3), np.zeros(3))
        assert all(map(math.isfinite, found.error(StepFeatures(0, 0, 0, 0, 0, 0, 0, 0), 0.0)))

    def test_a_decision_is_cheap(self) -> None:
        count = 3 * MOST_STEPS
        found = Neighbours(steps(count), np.zeros(count), np.full(count, 0.1))
        assert len(found) == MOST_STEPS
        assert min(timeit.repeat(lambda: found.error(STEP, 0.0), number=20, repeat=10)) / 20 < 200e-6


class TestPolicy:
    def of_errors(self, stock_us: float, **changes: object) -> CostPolicy:
        """A profile whose stock kernel is predicted 20 % slower and was measured at so many microseconds."""
        times = {"packed": {"native": 100.0}, "stock": {"fa3": stock_us}}
        measured = [MeasuredStep(step=dataclasses.astuple(step)[:-1], **times) for step in steps(40)]
        known = {"head_shapes": ["32/8/128"], "steps": measured, **changes}
        return cost_policy(MADE.model_copy(update=known), "native", "fa3", SHAPE)

    def test_steps_that_lost_stay_with_the_stock_backend(self) -> None:
        assert self.of_errors(120.0).decide(STEP).route is Route.PACKED
        assert self.of_errors(90.0).decide(STEP).route is Route.STOCK
        assert self.of_errors(90.0).decide(STEP, Route.PACKED).route is Route.STOCK

    def test_a_kind_of_step_that_was_not_measured_needs_more(self) -> None:
        policy, other = self.of_errors(150.0), dataclasses.replace(STEP, requests=3, nodes=0, links=0, linked_tokens=0)
        assert policy.decide(other).route is Route.STOCK
        assert policy.decide(other, Route.PACKED).route is Route.PACKED

    @pytest.mark.parametrize(
        "other", [{"head_shapes": ["64/4/128"]}, {"kv_bytes": 1}, {"packed": {"native": Fit(us={"launch": 0.0})}}]
    )
    def test_steps_of_other_heads_or_kv_or_without_a_time_have_no_influence(self, other: dict[str, Any]) -> None:
        assert self.of_errors(90.0, **other).neighbours is None

    def test_a_margin_of_the_user_replaces_them(self) -> None:
        policy = cost_policy(MADE, "native", "fa3", SHAPE, margin=0.3)
        assert policy.neighbours is None
        assert policy.decide(STEP).route is Route.STOCK


def test_a_profile_keeps_its_steps(tmp_path: Path) -> None:
    step = MeasuredStep(step=(1, 10, 10, 0, 0, 0, 10, 10), packed={"native": 5.5}, stock={"fa3": 6.0})
    saved = MADE.model_copy(update={"steps": [step, step]})
    saved.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == saved
