"""A forest as the levels of cascade attention, and the flattenings of it that are worth timing.

Cascade attention knows levels: at each one the batch, in order, is divided into groups that share a range of KV. A
flattening names the depths of the forest after which to cut; nodes between two cuts become one level, read again by
every group below. The last level is always what is left of each request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from benchmarks.workloads.case import Case

LAUNCH_SECONDS = 4e-6  # what one more level costs in launches and merging, to rank flattenings by
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """Groups of one level.

    Attributes:
        query_bounds: [groups + 1], group g holds the requests query_bounds[g] to query_bounds[g + 1].
        kv_ranges: (begin, end) of the positions group g reads here, of any of its requests; may be empty.
    """

    query_bounds: tuple[int, ...]
    kv_ranges: tuple[tuple[int, int], ...]

    @property
    def kv_tokens(self) -> int:
        return sum(end - begin for begin, end in self.kv_ranges)


def levels_of(case: Case, cuts: Cuts) -> list[Level]:
    """The levels of a case cut after the depths `cuts` (ascending, 0: below the roots); requests' rests come last.

    A request whose path ends between two cuts is in a group of the node it ends at; at deeper levels it reads nothing.
    """
    requests = len(case.paths)
    begins = [0] * requests
    levels = []
    for cut in cuts:
        keys: list[tuple[int, int, int]] = []  # node that names the group (none: -1 - request), KV range
        for request, path in enumerate(case.paths):
            node, _, end = path[min(cut, len(path) - 1)] if path else (-1 - request, 0, 0)
            keys.append((node, begins[request], max(end, begins[request])))
        bounds, ranges = [0], []
        for request, key in enumerate(keys):
            if request == 0 or key != keys[request - 1]:
                ranges.append(key[1:])
                if request:
                    bounds.append(request)
        levels.append(Level((*bounds, requests), tuple(ranges)))
        begins = [key[2] for key in keys]
    levels.append(Level(tuple(range(requests + 1)), tuple(zip(begins, case.seq_lens, strict=True))))
    return levels


def modelled_seconds(case: Case, cuts: Cuts, bandwidth: float, kv_bytes: int = 2) -> float:
    """Time by bytes: each group's KV once, a 16-bit partial per request and level, and the launches."""
    q_heads, kv_heads = case.heads
    levels = levels_of(case, cuts)
    kv = sum(level.kv_tokens for level in levels) * 2 * kv_heads * case.head_dim * kv_bytes
    partials = 2 * len(levels) * len(case.paths) * q_heads * (2 * case.head_dim + 4)
    return (kv + partials) / bandwidth + len(levels) * LAUNCH_SECONDS


def candidates(case: Case, bandwidth: float, most_cuts: int = 4, keep: int = 1, kv_bytes: int = 2) -> list[Cuts]:
    """The best flattenings by the model, `keep` of each number of cuts from 1 to `most_cuts`; none without sharing.

    Args:
        kv_bytes: of one element of K or V.
    """
    depth = max((len(path) for path in case.paths), default=0)
    chosen: list[Cuts] = []
    for count in range(1, min(depth, most_cuts) + 1):
        ranked = sorted(
            itertools.combinations(range(depth), count),
            key=lambda cuts: modelled_seconds(case, cuts, bandwidth, kv_bytes),
        )
        chosen.extend(ranked[:keep])
    return chosen
