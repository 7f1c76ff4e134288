"""The verdict of an A/B test from step times: paired neighbouring blocks, an interval by block bootstrap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.routing.live_plan import LivePlan

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
TRIM = 0.25  # of steps, and of pairs, at either end: bursts hit one arm by chance
LIKE_BATCHES = 1.15  # most ratio of the mean requests of two blocks that are compared
LEAST_PAIRS = 8
# Quantiles of Student's t for 95 %, from these degrees of freedom on.
_T95 = {7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}
_POWER = 1.96 + 0.84  # 95 % confidence, 80 % power


@dataclass(frozen=True)
class ArmFigures:
    """One arm.

    Attributes:
        step_us: mean of steps; step_p99_us: of steps.
        tpot_us: time per output token while decoding: the mean over the requests of all steps.
        tokens_per_s: output tokens while decoding.
        packed: share of steps.
    """

    name: str
    steps: int
    step_us: float
    step_p99_us: float
    tpot_us: float
    tokens_per_s: float
    packed: float


@dataclass(frozen=True)
class CopySteps:
    """The decode steps of one data-parallel copy, in their order.

    Attributes:
        us: [steps] times, NaN where unknown.
        requests: [steps] running requests.
        packed: [steps] 1 for packed steps.
    """

    us: Floats
    requests: Floats
    packed: Floats


@dataclass(frozen=True)
class Comparison:
    """Times of B against those of A.

    Attributes:
        difference: time of B over time of A, minus one; low, high: its 95 % interval, None of too few pairs.
        winner: "A", "B" or None: no difference seen at this size.
        pairs: compared pairs of blocks.
        pairs_needed: pairs with which `effect` would be seen in 80 % of the tests; None: too few to tell.
        effect: as a fraction.
    """

    difference: float
    low: float | None
    high: float | None
    winner: str | None
    pairs: int
    pairs_needed: int | None
    effect: float

    def text(self, what: str, names: tuple[str, str]) -> str:
        """The comparison in words. what: the times, plural; names: of the arms."""
        pairs = f"{self.pairs} pairs of blocks"
        if self.low is None or self.high is None:
            return f"No difference seen at this size: {pairs}. At least {LEAST_PAIRS} pairs are needed."
        edges = f"95 %: {self.low:+.2%} to {self.high:+.2%}"
        interval = f"B's {what} differ from A's by {self.difference:+.2%} ({edges}), {pairs}."
        if self.winner is None:
            return f"No difference seen at this size. {interval}"
        return f"{self.winner} is faster: {names[self.winner == 'B']}. {interval}"


@dataclass(frozen=True)
class Verdict(Comparison):
    """The comparison of a live test.

    Attributes:
        dropped: pairs of unlike batches or without times.
        steps: decode steps of the test so far; steps_needed: for `pairs_needed`.
    """

    arms: tuple[ArmFigures, ArmFigures]
    dropped: int
    steps: int
    steps_needed: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """The verdict in words."""
        if not self.steps:
            return "The server ran no decode step meanwhile: a live test needs requests."
        text = self.text("steps", (self.arms[0].name, self.arms[1].name))
        if self.winner is not None or self.steps_needed is None:
            return text
        more = self.steps_needed - self.steps
        enough = "this test had them" if more <= 0 else f"{more:,} more"
        return f"{text} A difference of {self.effect:.1%} needs about {self.steps_needed:,} decode steps; {enough}."


def trimmed_mean(values: Floats) -> float:
    """Mean of the middle half."""
    return float(_middle(np.sort(values)).mean())


def _middle(ordered: Floats) -> Floats:
    """The middle half along the last axis."""
    cut = int(TRIM * ordered.shape[-1])
    return ordered[..., cut : ordered.shape[-1] - cut]


def judge(plan: LivePlan, copies: Sequence[CopySteps], effect: float = 0.01) -> Verdict:
    """The verdict on the first decode steps of a test, as many as each copy has. effect: for `steps_needed`."""
    ratios: list[float] = []
    dropped = 0
    for steps in copies:
        found = _pairs(plan, steps)
        ratios += [ratio for ratio in found if ratio is not None]
        dropped += found.count(None)
    compared = compare(ratios, plan.seed, effect)
    needed = compared.pairs_needed
    return Verdict(
        **asdict(compared),
        arms=_arms(plan, copies),
        dropped=dropped,
        steps=sum(len(steps.us) for steps in copies),
        steps_needed=None if needed is None else 2 * plan.block_steps * needed,
    )


def _pairs(plan: LivePlan, steps: CopySteps) -> list[float | None]:
    """log(time of B / time of A) of each whole pair of blocks; None: no times, or unlike batches."""
    order, size, us = plan.order(), plan.block_steps, steps.us
    found: list[float | None] = []
    for pair in range(len(us) // (2 * size)):
        blocks = {}
        for block in (2 * pair, 2 * pair + 1):
            rows = slice(block * size + plan.warmup_steps, (block + 1) * size)
            known = ~np.isnan(us[rows])
            if known.sum() >= max(2, (size - plan.warmup_steps) // 2):
                blocks[int(order[block])] = (trimmed_mean(us[rows][known]), float(steps.requests[rows][known].mean()))
        alike = len(blocks) == 2 and 1 / LIKE_BATCHES <= blocks[0][1] / max(blocks[1][1], 1e-9) <= LIKE_BATCHES
        found.append(math.log(blocks[1][0] / blocks[0][0]) if alike else None)
    return found


def compare(ratios: Sequence[float], seed: int, effect: float) -> Comparison:
    """The comparison by logarithms of ratios, in the order of the pairs. seed: of the bootstrap."""
    mean = math.expm1(trimmed_mean(np.array(ratios))) if ratios else 0.0
    if len(ratios) < LEAST_PAIRS:
        return Comparison(mean, None, None, None, len(ratios), None, effect)
    low, high = interval(np.array(ratios), seed)
    needed = math.ceil(len(ratios) * (0.5 * (high - low) / 1.96 * _POWER / math.log1p(effect)) ** 2)
    winner = "A" if low > 0 else "B" if high < 0 else None
    return Comparison(mean, math.expm1(low), math.expm1(high), winner, len(ratios), needed, effect)


def interval(ratios: Floats, seed: int) -> tuple[float, float]:
    """95 % interval of the trimmed mean, by a moving-block bootstrap that keeps the order of neighbours.

    The spread of bootstrap means is too small for few pairs. Student's t widens it.
    """
    count = len(ratios)
    length = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(count, size=(RESAMPLES, math.ceil(count / length)))
    index = (starts[:, :, None] + np.arange(length)) % count
    means = _middle(np.sort(ratios[index.reshape(RESAMPLES, -1)[:, :count]], axis=1)).mean(axis=1)
    freedom = max(7, count // length - 1)
    quantile = min(value for least, value in _T95.items() if freedom >= least)
    half = quantile * float(means.std()) * math.sqrt(count / (count - 1))
    centre = trimmed_mean(ratios)
    return centre - half, centre + half


def _arms(plan: LivePlan, copies: Sequence[CopySteps]) -> tuple[ArmFigures, ArmFigures]:
    counted = [_counted(plan, steps) for steps in copies]
    us, requests, packed = (
        np.concatenate([getattr(steps, name) for steps in copies]) for name in ("us", "requests", "packed")
    )
    made = []
    for arm, name in enumerate(plan.arms):
        chosen = np.concatenate(counted) == arm
        times, tokens = us[chosen], requests[chosen]
        some = len(times) > 0
        made.append(
            ArmFigures(
                name=name,
                steps=len(times),
                step_us=float(times.mean()) if some else 0.0,
                step_p99_us=float(np.quantile(times, 0.99)) if some else 0.0,
                tpot_us=float(times @ tokens / max(tokens.sum(), 1)) if some else 0.0,
                tokens_per_s=float(1e6 * tokens.sum() / times.sum()) if some else 0.0,
                packed=float(packed[chosen].mean()) if some else 0.0,
            )
        )
    return made[0], made[1]


def _counted(plan: LivePlan, steps: CopySteps) -> npt.NDArray[np.int8]:
    """[steps] the arm of each step that counts, -1 for others."""
    rows = np.arange(len(steps.us))
    arm_of = np.repeat(plan.order(), plan.block_steps)[: len(rows)]
    return np.where((rows % plan.block_steps >= plan.warmup_steps) & ~np.isnan(steps.us), arm_of, np.int8(-1))


def lines_of(verdict: Verdict) -> list[str]:
    """The verdict as text."""
    heads = f"{'arm':4} {'steps':>7} {'step ms':>9} {'p99 ms':>9} {'TPOT ms':>9} {'tokens/s':>10} {'packed':>7}  policy"
    found = [heads]
    for letter, arm in zip("AB", verdict.arms, strict=True):
        found.append(
            f"{letter:4} {arm.steps:7} {arm.step_us / 1e3:9.3f} {arm.step_p99_us / 1e3:9.3f} {arm.tpot_us / 1e3:9.3f} "
            f"{arm.tokens_per_s:10.0f} {arm.packed:7.0%}  {arm.name}"
        )
    return [*found, verdict.sentence()]


def steps_of_copies(copies: Sequence[dict[str, Any]]) -> tuple[LivePlan, list[CopySteps]]:
    """The plan and the steps of a live test's answer."""
    found = []
    for copy in copies:
        us = np.array([math.nan if value is None else value for value in copy["us"]], dtype=np.float64)
        found.append(CopySteps(us, np.array(copy["requests"], float), np.array(copy["packed"], float)))
    return LivePlan(**copies[0]["plan"]), found
