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
# Quantiles of Student's t for 95 %, by degrees of freedom; above the last, the normal distribution's.
_T95 = {7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}
_POWER = 1.96 + 0.84  # 95 % confidence, 80 % power


@dataclass(frozen=True)
class ArmFigures:
    """One arm. step_us: mean of steps; tokens_per_s: output tokens while decoding; packed: share of steps."""

    name: str
    steps: int
    step_us: float
    step_p99_us: float
    tokens_per_s: float
    packed: float


@dataclass(frozen=True)
class Verdict:
    """The comparison. difference: time of B over time of A, minus one, with its 95 % interval.

    Attributes:
        winner: "A", "B" or None: no difference seen at this size.
        pairs: compared pairs of blocks; dropped: others, of unlike batches or without times.
        steps: decode steps of the test so far.
        steps_needed: decode steps after which `effect` would be seen in 80 % of the tests.
        effect: as a fraction.
    """

    arms: tuple[ArmFigures, ArmFigures]
    difference: float
    low: float
    high: float
    winner: str | None
    pairs: int
    dropped: int
    steps: int
    steps_needed: int | None
    effect: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """The verdict in words."""
        interval = f"B's steps differ from A's by {self.difference:+.2%} (95 %: {self.low:+.2%} to {self.high:+.2%})"
        if self.winner is not None:
            name = self.arms[0 if self.winner == "A" else 1].name
            return f"{self.winner} is faster: {name}. {interval}, {self.pairs} pairs of blocks."
        text = f"No difference seen at this size. {interval}, {self.pairs} pairs of blocks."
        if self.steps_needed is None:
            return f"{text} At least {LEAST_PAIRS} pairs are needed."
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


def judge(plan: LivePlan, us: Floats, requests: Floats, packed: Floats, effect: float = 0.01) -> Verdict:
    """The verdict on the first len(us) decode steps of a test.

    Args:
        us: [steps] step times, NaN where unknown.
        requests: [steps] running requests.
        packed: [steps] 1 for packed steps.
        effect: difference for `steps_needed`.
    """
    order = plan.order()
    size = plan.block_steps
    ratios: list[float] = []
    dropped = 0
    for pair in range(len(us) // (2 * size)):
        blocks = {}
        for block in (2 * pair, 2 * pair + 1):
            rows = slice(block * size + plan.warmup_steps, (block + 1) * size)
            known = ~np.isnan(us[rows])
            if known.sum() >= max(2, (size - plan.warmup_steps) // 2):
                blocks[int(order[block])] = (trimmed_mean(us[rows][known]), float(requests[rows][known].mean()))
        if len(blocks) < 2 or not 1 / LIKE_BATCHES <= blocks[0][1] / max(blocks[1][1], 1e-9) <= LIKE_BATCHES:
            dropped += 1
            continue
        ratios.append(math.log(blocks[1][0] / blocks[0][0]))
    arms = _arms(plan, us, requests, packed)
    low, high, mean = -math.inf, math.inf, trimmed_mean(np.array(ratios)) if ratios else 0.0
    needed = None
    if len(ratios) >= LEAST_PAIRS:
        low, high = interval(np.array(ratios), plan.seed)
        half = 0.5 * (high - low)
        needed = math.ceil(2 * size * len(ratios) * (half / 1.96 * _POWER / math.log1p(effect)) ** 2)
    winner = "A" if low > 0 else "B" if high < 0 else None
    return Verdict(
        arms, math.expm1(mean), math.expm1(low), math.expm1(min(high, 700.0)), winner, len(ratios), dropped,
        len(us), needed, effect,
    )  # fmt: skip


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
    quantile = next((value for least, value in sorted(_T95.items()) if freedom <= least), 1.96)
    half = quantile * float(means.std()) * math.sqrt(count / (count - 1))
    centre = trimmed_mean(ratios)
    return centre - half, centre + half


def _arms(plan: LivePlan, us: Floats, requests: Floats, packed: Floats) -> tuple[ArmFigures, ArmFigures]:
    rows = np.arange(len(us))
    arm_of = np.repeat(plan.order(), plan.block_steps)[: len(us)]
    counted = (rows % plan.block_steps >= plan.warmup_steps) & ~np.isnan(us)
    made = []
    for arm, name in enumerate(plan.arms):
        chosen = counted & (arm_of == arm)
        times = us[chosen]
        some = len(times) > 0
        made.append(
            ArmFigures(
                name=name,
                steps=len(times),
                step_us=float(times.mean()) if some else 0.0,
                step_p99_us=float(np.quantile(times, 0.99)) if some else 0.0,
                tokens_per_s=float(1e6 * requests[chosen].sum() / times.sum()) if some else 0.0,
                packed=float(packed[chosen].mean()) if some else 0.0,
            )
        )
    return made[0], made[1]


def lines_of(verdict: Verdict) -> list[str]:
    """The verdict as text."""
    found = [f"{'arm':4} {'steps':>7} {'step ms':>9} {'p99 ms':>9} {'tokens/s':>10} {'packed':>7}  policy"]
    for letter, arm in zip("AB", verdict.arms, strict=True):
        found.append(
            f"{letter:4} {arm.steps:7} {arm.step_us / 1e3:9.3f} {arm.step_p99_us / 1e3:9.3f} {arm.tokens_per_s:10.0f} "
            f"{arm.packed:7.0%}  {arm.name}"
        )
    return [*found, verdict.sentence()]


def rows_of_copies(copies: Sequence[dict[str, Any]]) -> tuple[LivePlan, Floats, Floats, Floats]:
    """The plan and the rows of the first data-parallel copy of a live test's answer."""
    (copy, *_) = copies
    us = np.array([math.nan if value is None else value for value in copy["us"]], dtype=np.float64)
    return LivePlan(**copy["plan"]), us, np.array(copy["requests"], float), np.array(copy["packed"], float)
