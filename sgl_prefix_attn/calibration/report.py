"""How a profile does on measured steps: regret against an oracle, losses against the stock backend, by family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sgl_prefix_attn.calibration.judge import Outcome, judge

ALL = "all families"
RESAMPLES = 2000
HEADER = ("", "steps", "packed", "regret", "mean regret, 95 %", "worst against stock", "gain over stock")


@dataclass(frozen=True)
class Row:
    """A policy over the steps of a family. Ratios minus one: 0.1 is 10 % slower.

    Attributes:
        regret: of the total time, against an oracle that knows both times.
        mean_regret: geometric mean over steps; low and high are its 95 % interval, by bootstrap over steps.
        worst_loss: largest loss of a step against the stock backend; worst_key: that step.
        behind: steps behind the stock backend by more than 3 % and 1 us.
        gain: time on the stock backend over time by the policy, geometric mean.
    """

    family: str
    steps: int
    packed: int
    regret: float
    mean_regret: float
    low: float
    high: float
    worst_loss: float
    worst_key: str
    behind: int
    gain: float

    def cells(self) -> tuple[str, ...]:
        return (
            self.family,
            str(self.steps),
            str(self.packed),
            f"{self.regret:+.2%}",
            f"{self.mean_regret:+.2%} ({self.low:+.2%} to {self.high:+.2%})",
            f"{self.worst_loss:+.1%} {self.worst_key}",
            f"{self.gain:.2f}",
        )


def rows_of(steps: Sequence[Outcome], seed: int = 0) -> list[Row]:
    """A row of all steps, then one for each family, in order of appearance.

    Args:
        seed: of the bootstrap.

    Raises:
        ValueError: there are no steps.
    """
    families: dict[str, list[Outcome]] = {ALL: list(steps)}
    for step in steps:
        families.setdefault(step.case.family, []).append(step)
    return [_row(name, found, seed) for name, found in families.items()]


def _row(name: str, steps: list[Outcome], seed: int) -> Row:
    verdict = judge(steps)
    logs = np.log([step.us / step.best_us for step in steps])
    drawn = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.expm1(np.quantile(logs[drawn].mean(axis=1), [0.025, 0.975])).tolist()
    return Row(
        family=name,
        steps=verdict.steps,
        packed=verdict.packed,
        regret=verdict.regret,
        mean_regret=verdict.mean_regret,
        low=low,
        high=high,
        worst_loss=verdict.worst_loss[0],
        worst_key=verdict.worst_loss[1],
        behind=sum(step.us - step.stock_us > max(0.03 * step.stock_us, 1.0) for step in steps),
        gain=float(np.exp(np.mean(np.log([step.stock_us / step.us for step in steps])))),
    )


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The rows as an aligned table."""
    return table_lines([HEADER, *(row.cells() for row in rows)])


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equally many cells, with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(row).items()}
        for row in rows
    ]
