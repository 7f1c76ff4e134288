"""The batches of the GPU benchmark, their limits, and their flattenings into levels."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.kernel.gpu_flatten import levels_of
from benchmarks.kernel.gpu_limits import cheapest_cut
from sgl_prefix_attn.workloads.case import Case, make_case
from sgl_prefix_attn.workloads.committed import random_forest


def ragged_case(seed: int, requests: int = 40, levels: int = 4) -> Case:
    return make_case("a/ragged", (32, 8), *random_forest(seed, requests, levels, 50, 30))


@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_cut_is_the_least_of_all_cuts(seed: int) -> None:
    case = ragged_case(seed, requests=9, levels=3)
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


@pytest.mark.parametrize("cuts", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_levels_give_every_request_each_position_once(seed: int, cuts: tuple[int, ...]) -> None:
    case = ragged_case(seed)
    table = case.table()
    covered = [0] * len(case.paths)
    for level in levels_of(case, cuts):
        assert level.query_bounds[0] == 0
        assert level.query_bounds[-1] == len(case.paths)
        for first, last, (begin, end) in zip(level.query_bounds, level.query_bounds[1:], level.kv_ranges, strict=False):
            for request in range(first, last):
                assert begin == covered[request]
                assert (table[request, begin:end] == table[first, begin:end]).all()
                covered[request] = end
    assert covered == list(case.seq_lens)
