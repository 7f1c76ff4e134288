"""Fits cost models: non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.routing.cost import SMS, TERMS, KernelKind, term_values
from sgl_prefix_attn.routing.measured import TIME, MeasuredCase
from sgl_prefix_attn.routing.profile import Fit

Array = npt.NDArray[np.float64]

METHOD = (
    f"non-negative least squares on relative errors of {TIME} (graph replay of one layer, L2 flushed), weights "
    "refined until they stand for errors of the logarithm"
)
_REFINEMENTS = 30
_LEAST_APART = 10  # cases in which a term has to differ from the first, which is 1, to be told apart from it
_DIGITS = 6


def fits_of(kind: KernelKind, cases: Sequence[MeasuredCase], sms: int = SMS) -> dict[str, Fit]:
    """Fits of all kernels that were measured on at least as many cases as their cost has terms."""
    kernels = dict.fromkeys(kernel for case in cases for kernel in getattr(case, kind))
    fits = {}
    for kernel in kernels:
        measured = [case for case in cases if kernel in getattr(case, kind)]
        if len(measured) >= len(TERMS[kind]):
            fits[kernel] = fit_kernel(kind, kernel, measured, sms)
    return fits


def fit_kernel(kind: KernelKind, kernel: str, cases: Sequence[MeasuredCase], sms: int = SMS) -> Fit:
    """Fits the cost of a kernel. Also computes the error of each family of cases by a fit on all other families."""
    terms = np.array([term_values(kind, case.step, case.shape, sms) for case in cases])
    times = np.array([getattr(case, kind)[kernel] for case in cases])
    families = np.array([case.family for case in cases])
    coefficients = fit_coefficients(terms, times)
    left_out = {}
    for family in dict.fromkeys(families.tolist()):
        rest = families != family
        if rest.sum() >= terms.shape[1]:
            left_out[family] = round(_error(terms[~rest] @ fit_coefficients(terms[rest], times[rest]), times[~rest]), 4)
    return Fit(
        us={name: float(f"{value:.{_DIGITS}g}") for name, value in zip(TERMS[kind], coefficients, strict=True)},
        cases=len(cases),
        error=round(_error(terms @ coefficients, times), 4),
        error_left_out=left_out,
    )


def fit_coefficients(terms: Array, times: Array) -> Array:
    """Coefficients with small logarithmic errors.

    For small errors, (p - t)^2 / (p t) approximates log(p / t)^2; the weights 1 / (p t) are refined iteratively. A term
    that is 1 in nearly all cases, as `shares` is without those that share nothing, would take what a launch costs.
    """
    constant = (terms != terms[:, :1]).sum(axis=0) < _LEAST_APART
    constant[0] = False
    terms = np.where(constant, 0.0, terms)
    weights = 1.0 / times
    for _ in range(_REFINEMENTS):
        coefficients = non_negative_least_squares(terms * weights[:, None], times * weights)
        predicted = np.maximum(terms @ coefficients, 1e-3 * times)
        weights = 1.0 / np.sqrt(times * predicted)
    return coefficients


def _error(predicted: Array, times: Array) -> float:
    return float(np.sqrt(np.mean(np.log(np.maximum(predicted, 1e-9) / times) ** 2)))


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """The x >= 0 with the least |matrix @ x - target|, by the active-set method of Lawson and Hanson."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    columns = scaled.shape[1]
    solution = np.zeros(columns)
    free = np.zeros(columns, dtype=bool)
    tolerance = 1e-10 * float(np.linalg.norm(target))
    for _ in range(10 * columns):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[free] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            blocked = free & (trial <= 0)
            if not blocked.any():
                solution = trial
                break
            steps = solution[blocked] / np.maximum(solution[blocked] - trial[blocked], 1e-300)
            solution = solution + float(steps.min()) * (trial - solution)
            free &= solution > 1e-12
            solution[~free] = 0.0
    return solution / scale
