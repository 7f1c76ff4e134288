"""A/B tests simulated over recorded decode steps: false alarms, found differences, wrong winners.

    python -m benchmarks.serving.abtest_simulated --out benchmarks/results/abtest_simulated.json

A test takes a window of consecutive recorded steps at a drawn place, assigns blocks to arms in a drawn order, and
multiplies the times of arm B. Drift, bursts and autocorrelation are those of the recording. `--pack FILE.json SET`
adds the times and requests of a recording of `abtest record` to the file of recordings.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import git_commit
from sgl_prefix_attn.abtest.recording import read_recording
from sgl_prefix_attn.abtest.statistics import CopySteps, Floats, Verdict, judge
from sgl_prefix_attn.routing.live_plan import LivePlan

RECORDINGS = Path(__file__).resolve().parents[2] / "tests" / "abtest" / "recorded_steps.npz"
LAGS = (1, 8, 32, 128, 512)


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

    def facts(self) -> dict[str, Any]:
        """Spread and autocorrelation of the times."""
        logs = np.log(self.us[~np.isnan(self.us)])
        centred = logs - logs.mean()
        quantiles = np.nanquantile(self.us, (0.05, 0.5, 0.95, 0.99)) / 1e3
        return {
            "steps": len(self.us),
            "ms_at_5_50_95_99_percent": [round(float(value), 2) for value in quantiles],
            "autocorrelation_of_log": {
                str(lag): round(float((centred[:-lag] * centred[lag:]).mean() / (centred**2).mean()), 3) for lag in LAGS
            },
            "requests_mean": round(float(self.requests.mean()), 2),
        }


def simulate(steps: Steps, seed: int, b_over_a: float, pairs: int | None = None) -> Verdict:
    """One test. b_over_a: time of arm B over that of arm A; pairs: None: the default.

    Raises:
        ValueError: the recording is shorter than the test.
    """
    rng = np.random.default_rng(seed)
    fields = {} if pairs is None else {"pairs": pairs}
    plan = LivePlan.model_validate({"arms": ("cost", "packed"), "seed": int(rng.integers(1 << 31)), **fields})
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


def pack(source: Path, name: str, path: Path) -> None:
    """Adds the first copy of a recording to the file of recordings, times rounded to 10 us."""
    (copy, *_) = read_recording(source)
    arrays = dict(np.load(path)) if path.exists() else {}
    tens = np.where(np.isnan(copy.us), -1, np.round(copy.us / 10)).astype(np.int32)
    arrays |= {f"{name}_10us": tens, f"{name}_requests": copy.features[:, 0].astype(np.int16)}
    np.savez_compressed(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", nargs=2, metavar=("FILE.json", "SET"), help="add a recording, then end")
    parser.add_argument("--set", default="judge", help="recording to draw from (default judge)")
    parser.add_argument("--tests", type=int, default=400, metavar="N", help="of each kind (default 400)")
    parser.add_argument("--seed", type=int, default=70_000, metavar="N", help="of the first test (default 70000)")
    parser.add_argument("--pairs", type=int, metavar="N", help="pairs of blocks (default: that of `abtest live`)")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if args.pack:
        pack(Path(args.pack[0]), args.pack[1], RECORDINGS)
        return
    steps = Steps.read(args.set)
    plan = LivePlan.model_validate({"arms": ("cost", "packed"), **({"pairs": args.pairs} if args.pairs else {})})
    report: dict[str, Any] = {
        "commit": git_commit(), "recording": args.set, **steps.facts(), "tests": args.tests, "seed": args.seed,
        "steps_of_a_test": plan.steps, "block_steps": plan.block_steps, "warmup_steps": plan.warmup_steps,
        "verdicts": {},
    }  # fmt: skip
    for title, b_over_a in (("equal", 1.0), ("B 3 % slower", 1.03), ("B 3 % faster", 1 / 1.03)):
        report["verdicts"][title] = shares(steps, args.tests, args.seed, b_over_a, args.pairs)
        print(title, report["verdicts"][title], flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
