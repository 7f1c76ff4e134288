"""Cost models: the predicted time of one layer's attention in a decode step, as a sum of terms.

Coefficients are microseconds per unit of their term, fitted by `fit` and stored in a profile. They are never negative,
so a model never predicts less time for more work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures

KernelKind = Literal["packed", "stock"]
Term = Callable[[StepFeatures, ModelShape, int], float]  # of a step, a shape and the number of SMs

SMS = 132  # of an H200, and of profiles and results from before the number was recorded


def _kv_megabytes(tokens: int, shape: ModelShape) -> float:
    """MB of K and V of one layer, all KV heads."""
    return 2e-6 * tokens * shape.kv_heads * shape.head_dim * shape.kv_bytes


def _gigaflop(tokens: int, shape: ModelShape) -> float:
    """Gflop of both products of one query with `tokens` positions, all query heads."""
    return 4e-9 * tokens * shape.q_heads * shape.head_dim


def _head_megabytes(tokens: float, shape: ModelShape) -> float:
    """MB of K and V of one layer, one KV head: what one CTA reads."""
    return 2e-6 * tokens * shape.head_dim * shape.kv_bytes


def _longest_split_mb(step: StepFeatures, shape: ModelShape, ctas: int) -> float:
    """MB that the busiest CTA reads of one request.

    Kernels with split-KV cut requests evenly until the CTAs are full. A grid full of requests is not split, and the
    longest request takes the time of one CTA.
    """
    requests = step.requests * shape.kv_heads
    if requests >= ctas:
        return _head_megabytes(step.longest_request, shape)
    even = step.tokens * shape.kv_heads / (ctas - 0.5 * requests)
    return _head_megabytes(min(step.longest_request, even), shape)


def _unsplit_mb(step: StepFeatures, shape: ModelShape, sms: int) -> float:
    """MB of the longest request, weighted by how full two CTAs on each SM are of requests."""
    full = min(1.0, step.requests * shape.kv_heads / (2 * sms))
    return _head_megabytes(step.longest_request, shape) * full**8


# Packed kernels read every position once, multiply shared positions with many rows and combine partial results.
PACKED_TERMS: dict[str, Term] = {
    "launch": lambda step, shape, sms: 1.0,
    # MB of KV, each position once; of positions of a single request.
    "unique_mb": lambda s, shape, sms: _kv_megabytes(s.unique_tokens, shape),
    "own_mb": lambda s, shape, sms: _kv_megabytes(s.tokens - s.linked_tokens, shape),
    "shared_gflop": lambda s, shape, sms: _gigaflop(s.linked_tokens, shape),
    # Thousands, times KV heads: tails, shared ranges, requests below shared ranges.
    "tails": lambda s, shape, sms: 1e-3 * s.requests * shape.kv_heads,
    "nodes": lambda s, shape, sms: 1e-3 * s.nodes * shape.kv_heads,
    "links": lambda s, shape, sms: 1e-3 * s.links * shape.kv_heads,
    # MB of fp32 rows stored or combined.
    "row_mb": lambda s, shape, sms: 4e-6 * (s.requests + s.links) * shape.q_heads * shape.head_dim,
    "longest_range": lambda s, shape, sms: 1e-3 * s.longest_range,  # thousand tokens
    "shares": lambda s, shape, sms: float(s.nodes > 0),  # whether anything is shared
}
# Stock kernels read the positions of each request; repeated reads may hit the L2 cache.
STOCK_TERMS: dict[str, Term] = {
    "launch": lambda step, shape, sms: 1.0,
    # MB of KV, each position once; read again.
    "unique_mb": lambda s, shape, sms: _kv_megabytes(s.unique_tokens, shape),
    "repeated_mb": lambda s, shape, sms: _kv_megabytes(s.tokens - s.unique_tokens, shape),
    "gflop": lambda s, shape, sms: _gigaflop(s.tokens, shape),
    "requests": lambda s, shape, sms: 1e-3 * s.requests * shape.kv_heads,  # thousands, times KV heads
    "longest_request": lambda s, shape, sms: 1e-3 * s.longest_request,  # thousand tokens
    # MB of the longest split, with two or four CTAs on each SM; of the longest request where requests fill the CTAs.
    "split_2": lambda s, shape, sms: _longest_split_mb(s, shape, 2 * sms),
    "split_4": lambda s, shape, sms: _longest_split_mb(s, shape, 4 * sms),
    "unsplit": _unsplit_mb,
}
TERMS: dict[KernelKind, dict[str, Term]] = {"packed": PACKED_TERMS, "stock": STOCK_TERMS}


class KernelCost:
    """Microseconds of one layer by a kernel.

    Args:
        coefficients: microseconds per unit, by term; an absent term costs nothing.
        sms: of the GPU that they were fitted on.

    Raises:
        ValueError: an unknown term or a negative coefficient.
    """

    def __init__(self, kind: KernelKind, coefficients: Mapping[str, float], sms: int = SMS) -> None:
        unknown = sorted(set(coefficients) - set(TERMS[kind]))
        if unknown:
            raise ValueError(f"no term {unknown[0]!r} in the cost of {kind} steps; there are {', '.join(TERMS[kind])}")
        for name, value in coefficients.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"term {name!r} costs {value} us; expected a finite number from 0 on")
        self.kind = kind
        self.sms = sms
        self.coefficients = dict(coefficients)
        self._used = [(TERMS[kind][name], value) for name, value in coefficients.items() if value]

    def microseconds(self, step: StepFeatures, shape: ModelShape) -> float:
        total = 0.0
        for term, coefficient in self._used:
            total += coefficient * term(step, shape, self.sms)
        return total


def term_values(kind: KernelKind, step: StepFeatures, shape: ModelShape, sms: int = SMS) -> list[float]:
    """The terms of a step in the order of `TERMS[kind]`."""
    return [term(step, shape, sms) for term in TERMS[kind].values()]
