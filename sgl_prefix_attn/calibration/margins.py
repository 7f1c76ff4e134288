"""Route margins: how much faster packed must be predicted to be before a step runs packed. Fitted to measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.calibration.fit import Array, fit_coefficients
from sgl_prefix_attn.routing.cost import SMS, KernelKind, term_values
from sgl_prefix_attn.routing.measured import MeasuredCase

LEAST_PERCENT = 5  # about the median prediction error; it costs less than 0.1 % of the time of drawn steps
MOST_PERCENT = 30
TOLERATED_LOSS = 0.02  # fraction of a step's time on the stock backend
# Steps of which one may lose more: among thousands a single one would decide the margin of all.
STEPS_OF_A_LOSS = 500
SIMULATION_ERROR = 0.04  # median of the simulator's: a loss that is no larger is none


@dataclass(frozen=True)
class Times:
    """Microseconds of one kernel, float64 [steps]; NaN where there is no prediction or no time."""

    predicted: Array
    measured: Array


def margins_of(
    cases: Sequence[MeasuredCase], simulated: Mapping[str, Mapping[str, float]] | None = None, sms: int = SMS
) -> dict[str, dict[str, int]]:
    """Margins in percent by packed and stock kernel, see `fitting_margin`.

    Args:
        simulated: by packed kernel, microseconds by key of cases without a measured packed time. They judge margins;
            costs are fitted to measured times only.
    """
    simulated = simulated or {}
    stock = {kernel: _unknown_steps("stock", kernel, cases, sms) for kernel in _kernels("stock", cases)}
    margins: dict[str, dict[str, int]] = {}
    for packed_kernel in _kernels("packed", cases):
        packed = _unknown_steps("packed", packed_kernel, cases, sms, simulated.get(packed_kernel, {}))
        for stock_kernel, times in stock.items():
            margin = fitting_margin(packed, times)
            if margin is not None:
                margins.setdefault(packed_kernel, {})[stock_kernel] = margin
    return margins


def _kernels(kind: KernelKind, cases: Sequence[MeasuredCase]) -> list[str]:
    return list(dict.fromkeys(kernel for case in cases for kernel in getattr(case, kind)))


def fitting_margin(packed: Times, stock: Times) -> int | None:
    """Smallest margin from 5 % on with at most 2 % loss of any packed step, in leave-one-family-out validation.

    Of each 500 steps one may lose more. If no margin up to 30 % has that, the smallest margin with the least loss of
    the worst of the other steps.

    Returns:
        Percent; None without any prediction.
    """
    known = ~(np.isnan(packed.predicted + packed.measured) | np.isnan(stock.predicted + stock.measured))
    if not known.any():
        return None
    ratio = (stock.predicted / packed.predicted)[known]
    loss = (packed.measured / stock.measured - 1.0)[known]

    left_out = int(known.sum()) // STEPS_OF_A_LOSS

    def worst(percent: int) -> float:
        packed_steps = np.sort(loss[ratio > 1.0 + percent / 100])
        return float(packed_steps[-1 - left_out]) if len(packed_steps) > left_out else 0.0

    return min(
        range(LEAST_PERCENT, MOST_PERCENT + 1), key=lambda percent: (max(worst(percent), TOLERATED_LOSS), percent)
    )


def _unknown_steps(
    kind: KernelKind, kernel: str, cases: Sequence[MeasuredCase], sms: int, simulated: Mapping[str, float] | None = None
) -> Times:
    """Times of each family's steps, predicted by a fit on the other families; NaN where these are too few.

    Args:
        simulated: microseconds by key that stand in for times which were not measured; not fitted to.
    """
    measured = np.array([getattr(case, kind).get(kernel, np.nan) for case in cases])
    terms = np.array([term_values(kind, case.step, case.shape, sms) for case in cases])
    families = np.array([case.family for case in cases])
    predicted = np.full(len(cases), np.nan)
    for family in dict.fromkeys(families.tolist()):
        rest = (families != family) & ~np.isnan(measured)
        if rest.sum() >= terms.shape[1]:
            predicted[families == family] = terms[families == family] @ fit_coefficients(terms[rest], measured[rest])
    if simulated:
        stand_in = (1 - SIMULATION_ERROR) * np.array([simulated.get(case.key, np.nan) for case in cases])
        measured = np.where(np.isnan(measured), stand_in, measured)
    return Times(predicted, measured)
