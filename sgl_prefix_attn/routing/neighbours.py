"""What steps like this one took: a correction of the predicted ratio of two kernels, with a standard deviation.

The costs of `cost` are sums of terms. They err by 5 % in the median, by 20 % in some kinds of steps. Steps of one kind
err alike, so the errors of measured steps predict those of a new one, the more the nearer these steps are. This is a
Gaussian process with a fixed covariance. It is used only where the costs of both kernels are near to each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.routing.features import StepFeatures

Array = npt.NDArray[np.float64]

# Logarithm of predicted stock / predicted packed. Beyond, the costs decide alone.
NEAREST, FARTHEST = -0.5, 0.8
# Distance at which two steps still have most of their error in common, by place in `coordinates`. These and the next
# two come from batches of four KV types and head shapes of an H200, see docs/design-notes/simulator.md.
LENGTHS = np.array([2.25, 2.25, 1.05, 2.25, 1.05, 1.2, 0.75, 1.05])
NOISE = 1 / 3  # error of steps in the same place, as a fraction of that of all steps
LEAST_ERROR = 0.03  # standard deviation of a log ratio's error where no measured step is near: at least this much,
FEW_STEPS = 8  # ... and with fewer steps than these
ERROR_OF_FEW = 0.12  # ... this much
MOST_STEPS = 128  # a decision multiplies a matrix of this size


def coordinates(step: StepFeatures) -> list[float]:
    """Where a step is among all steps, without units: its size, its sharing, its raggedness."""
    requests, tokens, longest = max(1, step.requests), max(1, step.tokens), max(1, step.longest_request)
    return [
        math.log(requests),
        math.log(tokens),
        math.log(tokens / max(1, step.unique_tokens)),
        math.log1p(step.nodes),
        math.log1p(step.links / requests),
        math.log(longest * requests / tokens),
        math.log(max(1, step.longest_range) / longest),
        math.log1p(10.0 * step.linked_tokens / tokens),
    ]


class Neighbours:
    """Errors of the predicted ratio on measured steps.

    Args:
        steps: measured steps.
        predicted: float64 [steps], log of predicted stock / predicted packed microseconds.
        measured: float64 [steps], the same of measured microseconds.
    """

    def __init__(self, steps: Sequence[StepFeatures], predicted: Array, measured: Array) -> None:
        near = np.flatnonzero((predicted > NEAREST) & (predicted < FARTHEST)).tolist()
        places = np.array([coordinates(steps[index]) for index in near]).reshape(len(near), len(LENGTHS)) / LENGTHS
        spread = _spread_out(places, MOST_STEPS)
        self._places = places[spread]
        errors = (measured - predicted)[near]
        known = len(near) >= FEW_STEPS
        self._variance = max(LEAST_ERROR**2, float(np.mean(errors**2))) if known else ERROR_OF_FEW**2
        alike = _likeness(self._places, self._places) + NOISE**2 * np.eye(len(spread))
        self._inverse = np.linalg.inv(alike)
        self._weights = self._inverse @ errors[spread]

    def __len__(self) -> int:
        return len(self._places)

    def error(self, step: StepFeatures, predicted: float) -> tuple[float, float]:
        """Mean and standard deviation of log(measured ratio) - log(predicted ratio) of a step.

        Args:
            predicted: log of predicted stock / predicted packed microseconds.
        """
        if not NEAREST < predicted < FARTHEST:
            return 0.0, 0.0
        near = _likeness(np.array([coordinates(step)]) / LENGTHS, self._places)[0]
        unknown = 1.0 - float(near @ self._inverse @ near)
        return float(near @ self._weights), math.sqrt(self._variance * max(0.0, unknown))


def _likeness(left: Array, right: Array) -> Array:
    """Correlation of the errors of two steps, [left, right]: 1 in the same place, 0 far away."""
    return np.exp(-0.5 * ((left[:, None] - right[None]) ** 2).sum(axis=2))


def _spread_out(places: Array, most: int) -> list[int]:
    """Indices of at most `most` places, each the farthest from those before it, the first nearest to the middle."""
    if not len(places):
        return []
    found = [int(((places - places.mean(axis=0)) ** 2).sum(axis=1).argmin())]
    distance = np.full(len(places), np.inf)
    while len(found) < min(most, len(places)):
        distance = np.minimum(distance, ((places - places[found[-1]]) ** 2).sum(axis=1))
        found.append(int(distance.argmax()))
    return found
