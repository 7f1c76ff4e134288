"""The route of a decode or verify step: packed, or on the stock backend.

A decision depends on the step's forest, its lengths and the last decision only. All tensor-parallel ranks have the same
values of these and decide alike.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.cost import KernelCost
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.neighbours import Neighbours
from sgl_prefix_attn.routing.policy_names import PolicyName
from sgl_prefix_attn.routing.profile import Profile

MARGIN_WITH_NEIGHBOURS = 0.05  # what a change of routes may cost
DEVIATIONS = 3.0  # of the error of similar steps


class Route(enum.Enum):
    """The kernels that run a step."""

    PACKED = "packed"
    STOCK = "stock"


@dataclass(frozen=True)
class Decision:
    """A route and the predicted times behind it, in microseconds of one layer; None: no prediction."""

    route: Route
    packed_us: float | None = None
    stock_us: float | None = None


class Policy(Protocol):
    """Decides single steps."""

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        """The decision for a step that follows one with the route `before`."""


@dataclass(frozen=True)
class CostPolicy:
    """Compares predicted times.

    A step changes to packed if the prediction for packed is lower by a margin, so that prediction errors do not cost
    time. It changes back if the prediction for the stock backend is lower. The difference keeps batches near the border
    from changing routes in each step, which would cost a plan each time.

    Args:
        margin: as a fraction, 0.1 for 10 %.
        neighbours: measured steps that correct the predicted ratio. Their standard deviation widens the margin.
    """

    packed: KernelCost
    stock: KernelCost
    shape: ModelShape
    margin: float
    neighbours: Neighbours | None = None

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        """The decision for a step that follows one with the route `before`."""
        packed_us = self.packed.microseconds(step, self.shape)
        stock_us = self.stock.microseconds(step, self.shape)
        needed = self.needed(step, packed_us, stock_us, before)
        return Decision(Route.PACKED if packed_us < stock_us / needed else Route.STOCK, packed_us, stock_us)

    def needed(self, step: StepFeatures, packed_us: float, stock_us: float, before: Route = Route.STOCK) -> float:
        """The ratio of predicted stock to predicted packed time from which on a step runs packed."""
        changes = before is not Route.PACKED
        if self.neighbours is None or packed_us <= 0 or stock_us <= 0:
            return 1.0 + self.margin if changes else 1.0
        mean, deviation = self.neighbours.error(step, math.log(stock_us / packed_us))
        return math.exp(-mean) * ((1.0 + self.margin) * math.exp(DEVIATIONS * deviation) if changes else 1.0)


def cost_policy(
    profile: Profile, packed: str, stock: str, shape: ModelShape, margin: float | None = None
) -> CostPolicy | None:
    """The policy of a profile for a pair of kernels; None if the profile lacks one.

    Args:
        packed, stock: kernels, as the profile names them.
        margin: as a fraction, in place of the profile's; the measured steps have no influence then.
    """
    packed_cost, stock_cost = profile.cost("packed", packed), profile.cost("stock", stock)
    if packed_cost is None or stock_cost is None:
        return None
    if margin is not None:
        return CostPolicy(packed_cost, stock_cost, shape, margin)
    steps, predicted = [], []
    for measured in profile.steps_of(packed, stock, shape):
        packed_us = packed_cost.microseconds(measured.features, shape)
        stock_us = stock_cost.microseconds(measured.features, shape)
        if packed_us > 0 and stock_us > 0:  # a profile may lack the cost of a launch
            steps.append(measured)
            predicted.append(stock_us / packed_us)
    if not steps:
        return CostPolicy(packed_cost, stock_cost, shape, profile.margin(packed, stock) / 100)
    neighbours = Neighbours(
        [measured.features for measured in steps],
        np.log(predicted),
        np.log([measured.stock[stock] / measured.packed[packed] for measured in steps]),
    )
    return CostPolicy(packed_cost, stock_cost, shape, MARGIN_WITH_NEIGHBOURS, neighbours)


@dataclass(frozen=True)
class ThresholdPolicy:
    """Packed from a number of requests, or of reads of each distinct KV token, on. No predicted times."""

    feature: Literal["batch", "reuse"]
    bound: float

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        """The decision for a step; the route of the last one has no influence."""
        holds = step.requests >= self.bound
        if self.feature == "reuse":
            holds = step.tokens >= self.bound * step.unique_tokens
        return Decision(Route.PACKED if holds else Route.STOCK)


@dataclass(frozen=True)
class FixedPolicy:
    """The same route for every step."""

    route: Route

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        """The decision for any step."""
        return Decision(self.route)


@dataclass(frozen=True)
class AllOf:
    """Packed if all policies say so. Predicted times are those of the first policy that has them."""

    policies: tuple[Policy, ...]

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        """The decision for a step that follows one with the route `before`."""
        found = [policy.decide(step, before) for policy in self.policies]
        packed = all(decision.route is Route.PACKED for decision in found)
        times = next((decision for decision in found if decision.packed_us is not None), Decision(Route.STOCK))
        return Decision(Route.PACKED if packed else Route.STOCK, times.packed_us, times.stock_us)


def policy_of(name: PolicyName, cost: Policy, conservative: Policy) -> Policy:
    """The policy behind a name.

    Args:
        cost: decides for `cost`.
        conservative: decides for `conservative`.
    """
    made: list[Policy] = []
    for condition in name.conditions:
        if condition.kind == "batch" or condition.kind == "reuse":
            made.append(ThresholdPolicy(condition.kind, condition.bound))
        elif condition.kind == "packed" or condition.kind == "stock":
            made.append(FixedPolicy(Route(condition.kind)))
        else:
            made.append(cost if condition.kind == "cost" else conservative)
    return made[0] if len(made) == 1 else AllOf(tuple(made))


class Router:
    """A policy over the decode steps of a server, or over its verify steps.

    Keeps the facts of the forest and the last decision.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.last: Decision | None = None
        self._forest: PrefixForest | None = None
        self._facts: ForestFacts | None = None

    def decide(self, forest: PrefixForest, seq_lens: Int64Array, rows: int = 1) -> Route:
        """The route of a step.

        Args:
            forest: of the batch; the same object while the batch has the same requests.
            seq_lens: int64 [requests] KV lengths, including the tokens of this step.
            rows: query rows of each request.
        """
        facts = self._facts
        if facts is None or forest is not self._forest:
            facts = ForestFacts.of(forest)
            self._forest, self._facts = forest, facts
        before = Route.STOCK if self.last is None else self.last.route
        self.last = self.policy.decide(StepFeatures.of(facts, seq_lens, rows), before)
        return self.last.route
