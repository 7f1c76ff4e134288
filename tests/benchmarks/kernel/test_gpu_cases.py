"""The limits of the GPU benchmark's batches."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.kernel.gpu_limits import cheapest_cut
from benchmarks.workloads.case import make_case
from benchmarks.workloads.committed import random_forest


@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_cut_is_the_least_of_all_cuts(seed: int) -> None:
    case = make_case("a/ragged", (32, 8), *random_forest(seed, 9, 3, 50, 30))
    position, round_trip = 100.0, 700.0
    nodes = sorted({node for path in case.paths for node in path if sum(node in p for p in case.paths) > 1})
    costs = []
    for kept in itertools.product((False, True), repeat=len(nodes)):
        cut = {node for node, keep in zip(nodes, kept, strict=True) if keep}
        ranges, partials = set(), 0
        for request, (path, length) in enumerate(zip(case.paths, case.seq_lens, strict=True)):
            start = 0
            for node in path:
                if node in cut:
                    ranges.add((node, start))
                    start, partials = node[2], partials + 1
            ranges.add(((-1 - request, 0, length), start))
        costs.append(sum(node[2] - start for node, start in ranges) * position + partials * round_trip)
    assert cheapest_cut(case, position, round_trip) == min(costs)
