"""Route margins: how much faster packed must be predicted to be before a step runs packed. Fitted to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.routing.cost import Kind, term_values
from sgl_prefix_attn.routing.fit import Array, fit_coefficients
from sgl_prefix_attn.routing.measured import MeasuredCase

MOST_PERCENT = 30
TOLERATED_LOSS = 0.02  # fraction of a step's time on the stock backend


@dataclass(frozen=True)
class Times:
    """Microseconds of one kernel, float64 [steps]. predicted: NaN where no prediction was possible."""

    predicted: Array
    measured: Array


def margins_of(cases: Sequence[MeasuredCase]) -> dict[str, dict[str, int]]:
    """Margins in percent by packed and stock kernel, see `fitting_margin`."""
    packed_kernels = dict.fromkeys(kernel for case in cases for kernel in case.packed)
    stock_kernels = dict.fromkeys(kernel for case in cases for kernel in case.stock)
    margins: dict[str, dict[str, int]] = {}
    for packed in packed_kernels:
        for stock in stock_kernels:
            both = [case for case in cases if packed in case.packed and stock in case.stock]
            margin = fitting_margin(_unknown_steps("packed", packed, both), _unknown_steps("stock", stock, both))
            if margin is not None:
                margins.setdefault(packed, {})[stock] = margin
    return margins


def fitting_margin(packed: Times, stock: Times) -> int | None:
    """Smallest margin with at most 2 % loss of any step that runs packed, in leave-one-family-out validation.

    If no margin up to 30 % has that, the smallest margin with the least loss of the worst step.

    Returns:
        Percent; None without any prediction.
    """
    known = ~np.isnan(packed.predicted) & ~np.isnan(stock.predicted)
    if not known.any():
        return None
    ratio = (stock.predicted / packed.predicted)[known]
    loss = (packed.measured / stock.measured - 1.0)[known]

    def worst(percent: int) -> float:
        return float(max(loss[ratio > 1.0 + percent / 100], default=0.0))

    return min(range(MOST_PERCENT + 1), key=lambda percent: (max(worst(percent), TOLERATED_LOSS), percent))


def _unknown_steps(kind: Kind, kernel: str, cases: Sequence[MeasuredCase]) -> Times:
    """Times of each family's steps, predicted by a fit on the other families; NaN where these are too few."""
    measured = np.array([getattr(case, kind)[kernel] for case in cases])
    predicted = np.full(len(cases), np.nan)
    terms = np.array([term_values(kind, case.step, case.shape) for case in cases])
    families = np.array([case.family for case in cases])
    for family in dict.fromkeys(families.tolist()):
        rest = families != family
        if rest.sum() >= terms.shape[1]:
            predicted[~rest] = terms[~rest] @ fit_coefficients(terms[rest], measured[rest])
    return Times(predicted, measured)
