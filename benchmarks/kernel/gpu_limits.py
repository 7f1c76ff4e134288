"""The least time a decode step can take on a device, from bytes and operations alone.

With the copy bandwidth `b` (bytes read plus bytes written per second) and the matrix rate `f`:

    t_unique    = (K and V of every position once + q read + o written) / b
    t_leafmerge = (K and V read + q + o + partial results) / b, for the cheapest way to cut the forest into packs:
                  cutting below a node costs one round trip of a 16-bit partial output and a 32-bit lse for every
                  (request of the node, query head); not cutting makes each child read the node's positions again.
                  A request's last pack takes the other partials in, so its own result makes no round trip.
    t_mma       = 4 * head_dim operations for every (query head, position it sees) / f
    limit       = max(t_leafmerge, t_mma)

Every pack reads its positions once however many requests it has. q and o have 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.workloads.case import Case

MATRIX_RATE = 790e12  # bf16, measured on an H200
ELEMENT = 2
LSE = 4


@dataclass(frozen=True)
class Limits:
    """Microseconds; see the module."""

    unique_us: float
    leafmerge_us: float
    mma_us: float
    per_request_us: float

    @property
    def limit_us(self) -> float:
        return max(self.leafmerge_us, self.mma_us)


def limits(case: Case, bandwidth: float, matrix_rate: float = MATRIX_RATE, kv_bytes: int = ELEMENT) -> Limits:
    """Limits of a case; `per_request_us` is the time to read every request's positions from memory, shared or not.

    Args:
        bandwidth: bytes per second.
        matrix_rate: operations per second, of 16-bit products: KV of fewer bits is made 16 bits wide before.
        kv_bytes: of one element of K or V.
    """
    q_heads, kv_heads = case.heads
    requests = len(case.seq_lens)
    position = 2 * kv_heads * case.head_dim * kv_bytes
    fixed = 2 * requests * q_heads * case.head_dim * ELEMENT
    round_trip = 2 * q_heads * (case.head_dim * ELEMENT + LSE)

    def us(moved: float) -> float:
        return moved / bandwidth * 1e6

    return Limits(
        unique_us=us(case.unique_tokens * position + fixed),
        leafmerge_us=us(cheapest_cut(case, position, round_trip) + fixed),
        mma_us=4 * case.head_dim * q_heads * case.tokens / matrix_rate * 1e6,
        per_request_us=us(case.tokens * position + fixed),
    )


def cheapest_cut(case: Case, position_bytes: float, round_trip_bytes: float) -> float:
    """Least bytes of K, V and partials over all ways to cut the forest, each node on its own, into packs."""
    forest = case.forest()
    parents, ends = np.asarray(forest.node_parent).tolist(), np.asarray(forest.node_end).tolist()
    firsts, lasts = np.asarray(forest.node_first).tolist(), np.asarray(forest.node_last).tolist()
    order, tails = np.asarray(forest.order).tolist(), np.asarray(forest.tail_begin).tolist()
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node)  # the last list holds the roots, whose parent is -1
    known: dict[tuple[int, int], float] = {}

    def below(node: int, start: int, first: int, last: int) -> float:
        """Bytes of everything below a node, if packs below it start at position `start`."""
        total, place = 0.0, first
        for child in children[node]:
            total += requests_alone(place, firsts[child], start) + best(child, start)
            place = lasts[child]
        return total + requests_alone(place, last, start)

    def requests_alone(first: int, last: int, start: int) -> float:
        return sum(case.seq_lens[order[i]] - min(start, tails[order[i]]) for i in range(first, last)) * position_bytes

    def best(node: int, start: int) -> float:
        key = (node, start)
        if key not in known:
            first, last, end = firsts[node], lasts[node], ends[node]
            cut = (end - start) * position_bytes + (last - first) * round_trip_bytes + below(node, end, first, last)
            known[key] = min(cut, below(node, start, first, last))
        return known[key]

    return below(-1, 0, 0, len(order))
