"""Policies over recorded steps: where each would have sent the steps of a server, and the time by a routing profile.

Only one route of a recorded step has a time. The other is predicted: the recorded time, plus the predicted difference
of the two routes in each packed layer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_prefix_attn.abtest.recording import Recording
from sgl_prefix_attn.routing import policy_names
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.cost import CostModel
from sgl_prefix_attn.routing.policy import CostPolicy, FixedPolicy, Policy, Route, cost_policy, policy_of
from sgl_prefix_attn.routing.profile import Profile, load_profile
from sgl_prefix_attn.routing.profile_store import ProfileStore, ServerFacts

HEADER = ("policy", "steps", "packed", "not as the server", "ms a step", "against the server")


@dataclass(frozen=True)
class Predictor:
    """Costs of both routes on the recorded server. name: of the profile."""

    cost: CostPolicy
    name: str

    @classmethod
    def of(cls, profile: Profile, facts: ServerFacts, name: str, margin: int | None = None) -> Predictor | None:
        """The costs of the server's kernels, None if the profile lacks one. margin: percent; None: the profile's."""
        cost = cost_policy(
            profile, facts.packed, facts.stock, facts.shape, margin=None if margin is None else margin / 100
        )
        return None if cost is None else cls(cost, name)

    def us(self, route: Route) -> CostModel:
        return self.cost.packed if route is Route.PACKED else self.cost.stock


@dataclass(frozen=True)
class Row:
    """A policy over recorded steps.

    Attributes:
        steps: with paths, a time, and packed or stock kernels; others tell nothing about a policy.
        packed: of these, steps that the policy sends to packed kernels.
        moved: of these, steps that the policy sends elsewhere than the server did.
        us: mean time of a step; NaN without a profile.
        server_us: mean recorded time of the same steps.
    """

    name: str
    steps: int
    packed: int
    moved: int
    us: float
    server_us: float

    def cells(self) -> tuple[str, ...]:
        known = not math.isnan(self.us)
        return (
            self.name,
            str(self.steps),
            str(self.packed),
            str(self.moved),
            f"{self.us / 1e3:.3f}" if known else "?",
            f"{self.us / self.server_us - 1:+.2%}" if known and self.server_us else "?",
        )


def predictor_of(recordings: Sequence[Recording], profile: str | None, store: ProfileStore) -> Predictor | None:
    """Costs by a profile's file, or by the profile that the recorded server would take; None: no profile fits.

    Raises:
        ValueError: no step of the recordings had known layers, or the file has no cost of the server's kernels.
    """
    facts = _facts(recordings)
    if profile is not None:
        found = Predictor.of(load_profile(profile), facts, profile)
        if found is None:
            raise ValueError(f"{profile} has no cost of {facts.packed} and {facts.stock}, which the server has")
        return found
    stored = store.find(facts)
    return None if stored is None else Predictor.of(stored.stored.profile, facts, str(stored.stored))


def _facts(recordings: Sequence[Recording]) -> ServerFacts:
    found = next((recording.facts for recording in recordings if recording.facts is not None), None)
    if found is None:
        raise ValueError("the recording has no step: the server got no request meanwhile")
    return found


def rows_of(recordings: Sequence[Recording], policies: Sequence[str], predictor: Predictor | None) -> list[Row]:
    """A row for each policy.

    Args:
        policies: names as the setting `route` takes them, or PROFILE[@MARGIN] with a profile's file.
        predictor: of the times.

    Raises:
        ValueError: an unusable policy, or no usable step.
    """
    facts = _facts(recordings)
    return [_row(text, _policy(text, facts, predictor), recordings, predictor) for text in policies]


def _policy(text: str, facts: ServerFacts, predictor: Predictor | None) -> Policy:
    try:
        name = policy_names.parse(text)
    except policy_names.PolicyNameError:
        if ">=" in text:
            raise
        path, at, margin = text.rpartition("@")
        if at and not margin.isdigit():
            raise
        if not os.path.exists(os.path.expanduser(path if at else text)):
            expected = f"{policy_names.FORMS}; or PROFILE[@PERCENT]"
            raise ValueError(f"{text!r}: no such file, and no policy: expected {expected}") from None
        found = Predictor.of(load_profile(path if at else text), facts, text, int(margin) if at else None)
        if found is None:
            raise ValueError(f"{text}: no cost of {facts.packed} and {facts.stock}, which the server has") from None
        return found.cost
    rule = ConservativePolicy(facts.shape, facts.packed)
    if not name.predicts:
        return policy_of(name, rule, rule)
    without = FixedPolicy(Route.PACKED) if facts.packed == "cpu" else rule
    return policy_of(name, without if predictor is None else predictor.cost, rule)


def _row(text: str, policy: Policy, recordings: Sequence[Recording], predictor: Predictor | None) -> Row:
    steps = packed = moved = 0
    total = recorded = 0.0
    for recording in recordings:
        before = Route.STOCK
        for row, us in enumerate(recording.us.tolist()):
            step, ran = recording.step(row), recording.ran[row]
            if step is None or ran not in ("packed", "stock"):
                continue
            chosen = before = policy.decide(step, before).route
            if us != us:
                continue
            steps += 1
            recorded += us
            total += us
            packed += chosen is Route.PACKED
            if chosen.value != ran:
                moved += 1
                if predictor is not None and recording.facts is not None:
                    shape = recording.facts.shape
                    there = predictor.us(chosen).microseconds(step, shape)
                    here = predictor.us(Route(ran)).microseconds(step, shape)
                    total += recording.layers * (there - here)
    if not steps:
        raise ValueError("no recorded step has paths, a time, and packed or stock kernels: there is nothing to compare")
    mean = total / steps if predictor is not None or not moved else math.nan
    return Row(text, steps, packed, moved, mean, recorded / steps)
