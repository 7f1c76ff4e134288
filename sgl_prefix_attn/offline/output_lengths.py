"""Estimates of output lengths, by kind of request, from the requests that have finished."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.offline.prompts import Int64Array

Float64Array = npt.NDArray[np.float64]

# Results that the assumption "the limit is used up" weighs as much as.
_PRIOR_WEIGHT = 2.0
# Relative change of a kind's estimate that makes a new version.
_NEWS = 0.1
# Each kind makes versions of its own, and for each the queue is put in order again. Of more different limits than that
# those that differ little are one kind: limits that are what a prompt leaves of the context differ with its length.
_MOST_KINDS = 64
_KINDS_PER_DOUBLING = 4


class OutputLengths:
    """Estimates output lengths. BatchLLM takes them as constant within a task (section 4.3.2); so the requests of a
    kind have one estimate, which is learned as results arrive.

    Requests with the same limit are a kind, or, of many different ones, those with limits of about the same size.
    Before the first result of a kind its estimate is its limit (their mean) times the share of their limits that other
    kinds used, or the limit itself at the very start.

    Args:
        limits: int64 [requests] most tokens a request may generate.
        minimums: int64 [requests] tokens it generates at least (equal to the limit where it ignores the end of text).

    Raises:
        ValueError: a limit below 0 or a minimum outside 0..limit; names the request.
    """

    def __init__(self, limits: Int64Array, minimums: Int64Array | None = None) -> None:
        self._limits = np.asarray(limits, dtype=np.int64)
        self._minimums = np.zeros_like(self._limits) if minimums is None else np.asarray(minimums, dtype=np.int64)
        if self._minimums.shape != self._limits.shape:
            raise ValueError(f"minimums has {len(self._minimums)} entries for {len(self._limits)} requests")
        for request in np.flatnonzero((self._limits < 0) | (self._minimums < 0) | (self._minimums > self._limits)):
            raise ValueError(
                f"request {request}: limit {self._limits[request]}, minimum {self._minimums[request]}; "
                "expected 0 <= minimum <= limit"
            )
        self._kinds = _kinds_of(self._limits)
        members = np.bincount(self._kinds)
        self._kind_limits = np.bincount(self._kinds, self._limits) / members
        self._results = np.zeros(len(members))
        self._tokens = np.zeros(len(members))
        self._allowed = 0  # limits of all that have a result
        self._published = self._kind_estimates()
        self.version = 0

    def learn(self, request: int, tokens: int) -> None:
        """A result: `request` generated `tokens` tokens."""
        kind = self._kinds[request]
        self._results[kind] += 1
        self._tokens[kind] += tokens
        self._allowed += int(self._limits[request])
        now = self._kind_estimates()
        if np.any(np.abs(now - self._published) > _NEWS * np.maximum(1.0, self._published)):
            self._published = now
            self.version += 1

    def estimates(self) -> Float64Array:
        """[requests] expected output tokens; changes when `version` does."""
        return np.clip(self._published[self._kinds], self._minimums, self._limits)

    def _kind_estimates(self) -> Float64Array:
        used = _PRIOR_WEIGHT + self._tokens.sum()
        allowed = _PRIOR_WEIGHT + self._allowed
        prior = self._kind_limits * min(1.0, used / allowed)
        return (_PRIOR_WEIGHT * prior + self._tokens) / (_PRIOR_WEIGHT + self._results)


def _kinds_of(limits: Int64Array) -> Int64Array:
    """[requests] number of each one's kind."""
    different, kinds = np.unique(limits, return_inverse=True)
    if len(different) > _MOST_KINDS:
        sizes = np.floor(_KINDS_PER_DOUBLING * np.log2(np.maximum(limits, 1)))
        kinds = np.unique(sizes, return_inverse=True)[1]
    return kinds.astype(np.int64)
