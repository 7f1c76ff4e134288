"""Precision of partial outputs: what is measured is what the plans do."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.kernel.gpu_cases import select
from benchmarks.kernel.partial_precision import errors, ranges_of_queries
from sgl_prefix_attn.workloads.case import Case, make_case
from sgl_prefix_attn.workloads.committed import random_forest

CASES = [*select(["pat/12"], [(32, 8)]), make_case("random/small", (32, 8), *random_forest(1, 40, 4, 300, 90))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranges_of_a_query_are_all_of_its_positions(case: Case) -> None:
    ranges = ranges_of_queries(case)
    assert max(map(len, ranges)) > 1
    for of in ranges:
        assert of[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(of))
    assert sorted(of[-1][1] for of in ranges) == sorted(case.seq_lens)


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
def test_errors_are_those_of_the_types_roundings(sharpness: float) -> None:
    found = errors([(0, 50), (50, 64), (64, 300)], sharpness, torch.Generator().manual_seed(0))
    merged = {name: of[0] for name, of in found.items()}
    assert merged["float32"] < 2e-6 < 2e-5 < merged["float16"] < 2**-11 < 5e-4 < merged["bfloat16"] < 2**-8
    assert all(stored < 2**-8 * 1.5 for _, stored in found.values())
