"""A/B tests simulated over recorded decode steps.

A test takes a window of consecutive recorded steps at a drawn place, assigns blocks to arms in a drawn order, and
multiplies the times of arm B. Drift, bursts and autocorrelation are those of the recording.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_prefix_attn.abtest.statistics import CopySteps, Floats, Verdict, judge
from sgl_prefix_attn.routing.live_plan import LivePlan

RECORDINGS = Path(__file__).parent / "recorded_steps.npz"


@dataclass(frozen=True)
class Steps:
    """Recorded steps. us: float64 [steps], NaN where unknown; requests: float64 [steps]."""

    us: Floats
    requests: Floats

    @classmethod
    def read(cls, name: str, path: Path = RECORDINGS) -> Steps:
        """A set of the recordings: dev, by which the estimator was chosen, or judge."""
        with np.load(path) as arrays:
            us = arrays[f"{name}_10us"].astype(np.float64)
            return cls(np.where(us < 0, np.nan, 10 * us), arrays[f"{name}_requests"].astype(np.float64))


def simulate(steps: Steps, seed: int, b_over_a: float, pairs: int | None = None) -> Verdict:
    """One test. b_over_a: time of arm B over that of arm A; pairs: None: the default.

    Raises:
        ValueError: the recording is shorter than the test.
    """
    rng = np.random.default_rng(seed)
    fields = {} if pairs is None else {"pairs": pairs}
    plan = LivePlan.model_validate({"arms": ("auto", "packed"), "seed": int(rng.integers(1 << 31)), **fields})
    if plan.steps > len(steps.us):
        raise ValueError(f"{len(steps.us)} recorded steps for a test of {plan.steps}")
    window = slice(begin := int(rng.integers(len(steps.us) - plan.steps + 1)), begin + plan.steps)
    arm = np.repeat(plan.order(), plan.block_steps)
    us = steps.us[window] * np.where(arm == 1, b_over_a, 1.0)
    return judge(plan, [CopySteps(us, steps.requests[window], np.zeros(plan.steps))])


def shares(steps: Steps, tests: int, seed: int, b_over_a: float, pairs: int | None = None) -> dict[str, float]:
    """Share of the tests by verdict: none, A, B. seed: of the first test; the others follow."""
    winners = Counter(simulate(steps, seed + test, b_over_a, pairs).winner or "none" for test in range(tests))
    return {name: round(winners[name] / tests, 4) for name in ("none", "A", "B")}
