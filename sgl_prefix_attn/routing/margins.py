"""How much faster packed has to be predicted before a step runs packed: measured, like the costs themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.routing.cost import Kind, term_values
from sgl_prefix_attn.routing.fit import Array, fit_coefficients
from sgl_prefix_attn.routing.measured import MeasuredCase

MOST_PERCENT = 30
TOLERATED_LOSS = 0.02  # of a step, against the stock backend


@dataclass(frozen=True)
class Times:
    """Of one kernel, microseconds of the same steps, [steps]: `predicted` is nan where no prediction could be made."""

    predicted: Array
    measured: Array


def margins_of(cases: Sequence[MeasuredCase]) -> dict[str, dict[str, int]]:
    """For each pair of kernels, packed and stock, the margin in percent that `fitting_margin` finds."""
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
    """The smallest margin with which no step that runs packed takes more than 2 % longer than on the stock backend; if
    none up to 30 % is that safe, the smallest of those with which the worst step loses least.

    Returns:
        Percent; None if no step could be predicted.
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
    """Steps of each family predicted by a fit on the other families; nan where these are too few for one."""
    measured = np.array([getattr(case, kind)[kernel] for case in cases])
    predicted = np.full(len(cases), np.nan)
    terms = np.array([term_values(kind, case.step, case.shape) for case in cases])
    families = np.array([case.family for case in cases])
    for family in dict.fromkeys(families.tolist()):
        rest = families != family
        if rest.sum() >= terms.shape[1]:
            predicted[~rest] = terms[~rest] @ fit_coefficients(terms[rest], measured[rest])
    return Times(predicted, measured)
