"""The route of a decode or verify step: packed, or on the stock backend.

A decision depends on the step's forest and its lengths only. All tensor-parallel ranks have the same ones and decide
alike.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, Protocol

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import MIB, ForestFacts, StepFeatures, token_bytes
from sgl_prefix_attn.routing.policy_names import PolicyName


class Route(enum.Enum):
    """The kernels that run a step."""

    PACKED = "packed"
    STOCK = "stock"


class Policy(Protocol):
    """Decides single steps. Its text says when a step runs packed, to stand after "if"."""

    def decide(self, step: StepFeatures) -> Route:
        """The route of a step."""


@dataclass(frozen=True)
class ThresholdPolicy:
    """Packed from a number of requests, of reads of each distinct KV token, or of KV tokens that sharing saves on."""

    feature: Literal["batch", "reuse", "saved"]
    bound: float

    def decide(self, step: StepFeatures) -> Route:
        """The route of a step."""
        if self.feature == "batch":
            holds = step.requests >= self.bound
        elif self.feature == "reuse":
            holds = step.tokens >= self.bound * step.unique_tokens
        else:
            holds = step.saved_tokens >= self.bound
        return Route.PACKED if holds else Route.STOCK


@dataclass(frozen=True)
class FixedPolicy:
    """The same route for every step."""

    route: Route

    def decide(self, step: StepFeatures) -> Route:
        """The route of any step."""
        return self.route


@dataclass(frozen=True)
class AllOf:
    """Packed if all policies say so."""

    policies: tuple[Policy, ...]

    def decide(self, step: StepFeatures) -> Route:
        """The route of a step."""
        packed = all(policy.decide(step) is Route.PACKED for policy in self.policies)
        return Route.PACKED if packed else Route.STOCK


def policy_of(name: PolicyName, shape: ModelShape, auto: Policy, conservative: Policy) -> Policy:
    """The policy behind a name.

    Args:
        shape: of one rank.
        auto: decides for `auto`.
        conservative: decides for `conservative`.
    """
    made: list[Policy] = []
    for condition in name.conditions:
        if condition.kind == "batch" or condition.kind == "reuse":
            made.append(ThresholdPolicy(condition.kind, condition.bound))
        elif condition.kind == "saved":
            made.append(ThresholdPolicy("saved", condition.bound * MIB / token_bytes(shape)))
        elif condition.kind == "packed" or condition.kind == "stock":
            made.append(FixedPolicy(Route(condition.kind)))
        else:
            made.append(auto if condition.kind == "auto" else conservative)
    return made[0] if len(made) == 1 else AllOf(tuple(made))


class Router:
    """A policy over the decode steps of a server, or over its verify steps.

    Keeps the facts of the forest and the last step.

    Attributes:
        last: the last decided step and its route.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.last: tuple[StepFeatures, Route] | None = None
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
        step = StepFeatures.of(facts, seq_lens, rows)
        route = self.policy.decide(step)
        self.last = step, route
        return route
