"""Names of policies: what the setting `route` accepts, and what it means."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.policy import FixedPolicy, Route, policy_of
from sgl_prefix_attn.routing.policy_names import Condition, PolicyName, PolicyNameError, parse
from sgl_prefix_attn.settings import SettingsError, load_settings

STEP = StepFeatures(8, 4000, 1000, 8)  # of 15.6 MB, of which sharing saves 11.7
SHAPE = ModelShape(32, 8, 128)
CONDITIONS = st.one_of(
    st.sampled_from([Condition("auto"), Condition("conservative"), Condition("packed"), Condition("stock")]),
    st.integers(1, 2000).map(lambda bound: Condition("batch", float(bound))),
    st.floats(1, 9, allow_nan=False).map(lambda bound: Condition("reuse", round(bound, 2))),
    st.integers(1, 40).map(lambda bound: Condition("saved", float(bound))),
)


@given(st.lists(CONDITIONS, min_size=1, max_size=6), st.booleans())
def test_a_step_runs_packed_if_all_conditions_hold(conditions: list[Condition], by_auto: bool) -> None:
    name = parse(" and ".join(map(str, conditions)))
    assert parse(str(name)) == name
    auto = FixedPolicy(Route.PACKED if by_auto else Route.STOCK)
    rule = ConservativePolicy(SHAPE, "native")

    def route(of: PolicyName) -> Route:
        return policy_of(of, SHAPE, auto, rule).decide(STEP)

    each = [route(PolicyName((condition,))) for condition in conditions]
    assert route(name) is (Route.PACKED if set(each) == {Route.PACKED} else Route.STOCK)
    assert name.fixed is None or {route(name).value} == {name.fixed}


def test_the_bounds_belong_to_the_condition() -> None:
    for text, feature in (
        ("batch>=8", {"requests": 7}), ("reuse>=4", {"tokens": 3999}), ("saved>=11.71", {"tokens": 3997})
    ):  # fmt: skip
        policy = policy_of(parse(text), SHAPE, FixedPolicy(Route.STOCK), ConservativePolicy(SHAPE, "native"))
        assert policy.decide(STEP) is Route.PACKED
        assert policy.decide(dataclasses.replace(STEP, **feature)) is Route.STOCK


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cost", "auto"),
        ("Saved >= 16.0 and COST", "saved>=16 and auto"),
        (" Batch >= 64 AND reuse>=1.50", "batch>=64 and reuse>=1.5"),
        ("packed & batch>=2", "batch>=2"),
        ("auto and stock", "stock"),
        ("packed", "packed"),
        ("batch>=2 and batch>=2", "batch>=2"),
    ],
)
def test_spellings(text: str, name: str) -> None:
    assert str(parse(text)) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch>=many", r"'batch>=many': the N of batch>=N has to be a whole number from 1"),
        ("batch>=2.5", "the N of batch>=N has to be a whole number"),
        ("saved>=0", "'saved>=0': the MiB of saved>=MiB has to be a number above 0"),
        ("saved>=nan", "the MiB of saved>=MiB has to be a number above 0"),
        ("reuse>=0.5 and auto", r"'reuse>=0.5' in 'reuse>=0.5 and auto': the X of reuse>=X has to be a number from 1"),
        ("batch<64", "'batch<64' is not a routing policy; expected auto, conservative"),
        ("auto and ", "'auto and ' is not a routing policy"),
        ("", "'' is not a routing policy"),
        (" and ".join(f"batch>={n}" for n in range(1, 10)), "has 9 conditions; at most 8 are accepted"),
        (" and ".join(["packed"] * 15), "has 15 conditions; at most 8 are accepted"),
        ("packed" + " " * 30_000 + "x", r"^'packed {14}'\.\.\. has 30007 characters; at most 200 are accepted$"),
        (" and ".join(["auto"] * 32_000), "characters; at most 200 are accepted"),
        ("packed and and stock", "'' in 'packed and and stock' is not a routing policy"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(PolicyNameError, match=message):
        parse(text)
    with pytest.raises(SettingsError, match=r"PREFIXPACK_ROUTE=.* accepted is auto, conservative"):
        load_settings({"PREFIXPACK_ROUTE": text or "none"})


def test_the_setting_keeps_auto() -> None:
    assert load_settings({}).route == load_settings({"PREFIXPACK_ROUTE": "cost"}).route == "auto"
    assert load_settings({"PREFIXPACK_ROUTE": "batch >= 128"}).route == "batch>=128"
