"""The time that routing policies would have taken over measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_prefix_attn.core.gpu import H200
from sgl_prefix_attn.routing import policy_names, rule, verify
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.measured import MeasuredCase, Results
from sgl_prefix_attn.routing.policy import Route, policy_of

# A step is behind the stock backend if it takes more than this fraction and as many microseconds longer.
BEHIND, BEHIND_US = 0.03, 1.0


@dataclass(frozen=True)
class Outcome:
    """One step under a policy, and the measured microseconds of both routes."""

    case: MeasuredCase
    route: Route
    packed_us: float
    stock_us: float

    @property
    def us(self) -> float:
        return self.packed_us if self.route is Route.PACKED else self.stock_us

    @property
    def regret(self) -> float:
        """Time lost against an oracle that knows both times, as a fraction of the oracle's."""
        return self.us / min(self.packed_us, self.stock_us) - 1

    @property
    def is_behind(self) -> bool:
        """Whether the step is behind the stock backend."""
        return self.us - self.stock_us > max(BEHIND * self.stock_us, BEHIND_US)


@dataclass(frozen=True)
class Verdict:
    """A policy over many steps. Losses are ratios minus one: 0.1 is 10 % slower.

    Attributes:
        steps: number of steps.
        packed: number of steps that ran packed.
        regret: total time against the total of an oracle that knows both times.
        mean_regret: mean of the steps' regrets.
        behind: steps behind the stock backend.
        worst: largest loss of a step against the stock backend, and the step's key.
        gain: time on the stock backend over time by the policy, geometric mean of the steps.
        oracle: the same by the oracle.
    """

    steps: int
    packed: int
    regret: float
    mean_regret: float
    behind: int
    worst: tuple[float, str]
    gain: float
    oracle: float


def outcomes(results: Results, name: policy_names.PolicyName, packed: str, backend: str) -> list[Outcome]:
    """The measured steps with times of both routes, as a policy would have run them. `auto` is that of the GPU.

    Args:
        packed: the packed kernels, native or triton.
        backend: the stock SGLang backend.
    """
    kernels = rule.KernelPair(results.machine, results.capability, packed, backend)
    found = []
    for case in results.cases:
        packed_us, stock_us = case.packed.get(packed), case.stock.get(backend)
        if packed_us is None or stock_us is None:
            continue
        # The rule of verify steps is that of an H200, on whatever GPU they were measured.
        is_decode = case.step.rows == 1
        auto = rule.auto(kernels, case.shape) if is_decode else verify.policy(H200.name, packed, backend, case.shape)
        policy = policy_of(name, case.shape, auto, ConservativePolicy(case.shape, packed))
        found.append(Outcome(case, policy.decide(case.step), packed_us, stock_us))
    return found


def judge(steps: Sequence[Outcome]) -> Verdict:
    """Totals of outcomes.

    Raises:
        ValueError: there are no outcomes.
    """
    if not steps:
        raise ValueError("no measured step has both times")
    best = [min(step.packed_us, step.stock_us) for step in steps]
    return Verdict(
        steps=len(steps),
        packed=sum(step.route is Route.PACKED for step in steps),
        regret=sum(step.us for step in steps) / sum(best) - 1,
        mean_regret=sum(step.regret for step in steps) / len(steps),
        behind=sum(step.is_behind for step in steps),
        worst=max((step.us / step.stock_us - 1, step.case.key) for step in steps),
        gain=_geometric_mean([step.stock_us / step.us for step in steps]),
        oracle=_geometric_mean([step.stock_us / us for step, us in zip(steps, best, strict=True)]),
    )


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equally many cells, with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
