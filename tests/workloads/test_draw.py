"""Drawn cases: the same for the same seed, within bounds, every family and head setting in every set."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.workloads import ALL_FAMILIES, ALL_HEADS, draw, draw_set
from benchmarks.workloads.committed import FASTTREE_TREES, PAT_TREES, tree_paths
from sgl_prefix_attn.explain.batch import parse_tree


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_case_is_a_function_of_its_seed(family: str, seed: int) -> None:
    case = draw(seed, family, (32, 8))
    assert case == draw(seed, family, (32, 8))
    assert case != draw(seed + 100, family, (32, 8))
    assert case.family == family
    assert case.detail


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_requests_fit_their_paths_and_the_forest(family: str, seed: int) -> None:
    case = draw(seed, family, (8, 1))
    assert (case.lengths > case.tail_begin).all()
    forest = case.forest()
    nodes = np.asarray(forest.node_end) - np.asarray(forest.node_begin)
    own = case.lengths - np.asarray(forest.tail_begin)
    assert nodes.sum() + own.sum() == case.unique_tokens
    assert 1 <= len(case.seq_lens) <= 1024


def test_every_family_meets_every_head_setting_in_a_set() -> None:
    cases = draw_set(5)
    assert len({case.key for case in cases}) == len(cases) == 300
    assert min(Counter(case.family for case in cases).values()) >= 12
    assert min(Counter(case.heads for case in cases).values()) >= 12
    assert {(case.family, case.heads) for case in cases} == {(f, h) for f in ALL_FAMILIES for h in ALL_HEADS}
    assert {(case.head_dim, case.kv_dtype) for case in cases} == {
        (128, "bf16"), (64, "bf16"), (256, "bf16"), (128, "fp8_e4m3"),
    }  # fmt: skip


@pytest.mark.parametrize("tree", [*PAT_TREES, *FASTTREE_TREES])
def test_listed_trees_are_those_that_explain_reads(tree: str) -> None:
    paths, seq_lens = tree_paths(tree)
    read = parse_tree(tree)
    assert seq_lens == read.seq_lens.tolist()
    assert [[segment[1:] for segment in path] for path in paths] == [[s[1:] for s in path] for path in read.paths]
    shared = [{r for r, path in enumerate(side) if segment in path} for side in (paths, read.paths)
              for segment in sorted({s for path in side for s in path})]  # fmt: skip
    assert sorted(map(sorted, shared[: len(shared) // 2])) == sorted(map(sorted, shared[len(shared) // 2 :]))
