"""How much faster packed has to be predicted: as much as keeps unknown steps from losing, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_prefix_attn.calibration.margins import LEAST_PERCENT, MOST_PERCENT, Times, fitting_margin, margins_of
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.measured import MeasuredCase
from sgl_prefix_attn.routing.profile import DEFAULT_MARGIN, Profile, shipped_profile
from sgl_prefix_attn.settings import Settings
from tests.calibration.test_fit import drawn_steps

MEASURED = np.array([100.0, 100.0, 100.0])


def margin(predicted_stock: list[float], measured_packed: list[float]) -> int | None:
    """Of steps that are predicted to take 100 us packed, and take 100 us on the stock backend."""
    packed = Times(np.full(3, 100.0), np.array(measured_packed))
    return fitting_margin(packed, Times(np.array(predicted_stock), MEASURED))


@pytest.mark.parametrize(
    ("predicted_stock", "measured_packed", "percent"),
    [
        ([110.0, 150.0, 90.0], [95.0, 60.0, 130.0], 5),    # no step that would run packed loses
        ([110.0, 150.0, 90.0], [101.9, 60.0, 130.0], 5),   # two percent may be lost
        ([110.4, 150.0, 90.0], [103.0, 60.0, 130.0], 11),  # the first has to stay with the stock backend
        ([110.4, 125.6, 90.0], [103.0, 108.0, 95.0], 26),
        ([150.0, 125.6, 90.0], [103.0, 108.0, 95.0], 26),  # no margin keeps the first from it: the second, at least
        ([150.0, 160.0, 90.0], [130.0, 108.0, 95.0], 5),   # nor any step: the smallest of those that lose alike
        ([float("nan"), 150.0, 110.4], [130.0, 60.0, 103.0], 11),
        ([float("nan")] * 3, [130.0, 60.0, 103.0], None),
    ],
)  # fmt: skip
def test_the_smallest_that_keeps_steps_from_losing(predicted_stock, measured_packed, percent):
    assert margin(predicted_stock, measured_packed) == percent


def test_one_step_of_500_may_lose_more() -> None:
    """Two losing steps of 1,000 do not decide the margin; a third does."""
    predicted, measured = np.full(1000, 100.0), np.full(1000, 90.0)
    stock = Times(np.full(1000, 112.0), np.full(1000, 100.0))
    measured[:2] = 130.0
    assert fitting_margin(Times(predicted, measured), stock) == LEAST_PERCENT
    measured[2] = 130.0
    assert fitting_margin(Times(predicted, measured), stock) == 12


def test_each_family_is_predicted_from_the_others() -> None:
    """By themselves the slow family's steps would be predicted without error, and none would need a margin."""
    cases = []
    for number, step in enumerate(drawn_steps(90)):
        family, stock = "abc"[number % 3], 50.0 + step.unique_tokens / 1000 + step.tokens / 3000
        packed = {"native": stock * (1.06 if family == "c" else 0.90)}
        cases.append(MeasuredCase(str(number), family, ModelShape(32, 8, 128), step, packed, {"fa3": stock}))
    found = margins_of(cases)
    assert set(found) == {"native"}
    assert LEAST_PERCENT < found["native"]["fa3"] <= MOST_PERCENT
    assert margins_of([case for case in cases if case.family != "c"]) == {"native": {"fa3": LEAST_PERCENT}}


def test_a_profile_without_margins_has_the_default_one() -> None:
    shipped = shipped_profile()
    older = Profile.model_validate(shipped.model_dump(exclude={"margins"}))
    assert older.margin("native", "fa3") == DEFAULT_MARGIN
    assert shipped.margin("native", "fa3") == shipped.margins["native"]["fa3"]
    assert shipped.margin("native", "unheard of") == DEFAULT_MARGIN
    assert str(Settings.model_fields["route_margin"].description).count(f", or {DEFAULT_MARGIN};") == 1


def test_simulated_times_judge_margins_but_are_not_fitted() -> None:
    """Steps with a simulated packed time are predicted from the measured ones alone."""
    rng = np.random.default_rng(1)

    def case(number: int, measured: bool) -> MeasuredCase:
        tokens = int(rng.integers(1000, 200_000))
        step = StepFeatures(4, tokens, tokens, 0, 0, 0, tokens // 4, tokens // 4)
        us = 10.0 + tokens / 1000
        packed = {"native": 0.9 * us} if measured else {}
        return MeasuredCase(str(number), "ab"[number % 2], ModelShape(32, 8, 128), step, packed, {"fa3": us})

    cases = [case(number, number < 60) for number in range(80)]
    assert margins_of(cases) == {"native": {"fa3": LEAST_PERCENT}}
    slow = {one.key: 1.09 * one.stock["fa3"] for one in cases[60:]}
    assert margins_of(cases, {"native": slow})["native"]["fa3"] > LEAST_PERCENT
