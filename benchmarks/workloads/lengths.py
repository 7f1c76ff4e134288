"""Distributions of token counts, and a builder of radix-tree paths."""

from __future__ import annotations

import numpy as np

from benchmarks.workloads.case import Path

Rng = np.random.Generator


def log_uniform(rng: Rng, low: float, high: float) -> int:
    """An integer of low .. high, its logarithm uniform."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def log_normal(rng: Rng, median: float, sigma: float, low: int, high: int, count: int) -> list[int]:
    """`count` log-normal integers, cut to low .. high. sigma: of the logarithm."""
    return np.clip(rng.lognormal(np.log(median), sigma, count), low, high).astype(int).tolist()


def exponential(rng: Rng, mean: float, low: int, high: int, count: int) -> list[int]:
    """`count` exponential integers, cut to low .. high."""
    return np.clip(rng.exponential(mean, count), low, high).astype(int).tolist()


def zipf_index(rng: Rng, count: int, exponent: float) -> int:
    """An index of 0 .. count - 1; index i has a weight of (i + 1) ** -exponent."""
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    return int(rng.choice(count, p=weights / weights.sum()))


class Batch:
    """Requests under construction: paths of nodes with fresh ids, and lengths."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.seq_lens: list[int] = []
        self._nodes = 0

    def extend(self, path: Path, tokens: int) -> Path:
        """`path` and a new node of `tokens` tokens behind it; 0 adds no node."""
        if tokens <= 0:
            return path
        begin = path[-1][2] if path else 0
        self._nodes += 1
        return [*path, (self._nodes - 1, begin, begin + tokens)]

    def add(self, path: Path, own_tokens: int) -> None:
        """A request below `path` with at least one token of its own."""
        self.paths.append(path)
        self.seq_lens.append((path[-1][2] if path else 0) + max(1, own_tokens))
