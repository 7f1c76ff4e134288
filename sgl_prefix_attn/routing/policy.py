"""The decision: packed, or request by request on the stock backend.

It depends on the step's forest and lengths, and on the decision before, never on clocks or free memory: all
tensor-parallel ranks have the same of all that and decide alike.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.cost import CostModel
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures


class Route(enum.Enum):
    """Which kernels run a decode step."""

    PACKED = "packed"
    STOCK = "stock"


@dataclass(frozen=True)
class Decision:
    """A decision and what it rests on: predicted microseconds of one layer."""

    route: Route
    packed_us: float
    stock_us: float


@dataclass(frozen=True)
class CostPolicy:
    """Compares predicted times.

    A step takes the packed route if that is predicted to be faster by `margin` at least, because predictions err and
    who turns packing on must not lose by it. Once packed, steps stay so until the stock backend is predicted to be
    the faster one: so batches at the border do not go back and forth, which would cost a plan each time.

    Args:
        margin: share, 0.1 for 10 %.
    """

    packed: CostModel
    stock: CostModel
    shape: ModelShape
    margin: float

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        packed_us = self.packed.microseconds(step, self.shape)
        stock_us = self.stock.microseconds(step, self.shape)
        bound = stock_us if before is Route.PACKED else stock_us / (1.0 + self.margin)
        return Decision(Route.PACKED if packed_us < bound else Route.STOCK, packed_us, stock_us)


class Router:
    """A policy over the decode steps of a server: remembers the forest's facts and the last decision."""

    def __init__(self, policy: CostPolicy) -> None:
        self.policy = policy
        self.last: Decision | None = None
        self._forest: PrefixForest | None = None
        self._facts: ForestFacts | None = None

    def decide(self, forest: PrefixForest, seq_lens: Int64Array) -> Route:
        """The route of a decode step.

        Args:
            forest: the batch's forest; the same object while membership does not change.
            seq_lens: [requests] int64 KV lengths by batch index, the step's own tokens included.
        """
        facts = self._facts
        if facts is None or forest is not self._forest:
            facts = ForestFacts.of(forest)
            self._forest, self._facts = forest, facts
        before = Route.STOCK if self.last is None else self.last.route
        self.last = self.policy.decide(StepFeatures.of(facts, seq_lens), before)
        return self.last.route
