"""Drawn cases: the same for the same seed, within bounds, every family and head setting in every set."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sgl_prefix_attn.explain.batch import parse_tree
from sgl_prefix_attn.workloads import ALL_FAMILIES, ALL_HEADS, draw, draw_set
from sgl_prefix_attn.workloads.committed import FASTTREE_TREES, PAT_TREES, tree_paths
from sgl_prefix_attn.workloads.families import outputs_so_far


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


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_kv_is_bounded_by_leaving_requests_out(family: str) -> None:
    for seed in range(8):
        whole = draw(seed, family, (32, 32), 256)
        part = draw(seed, family, (32, 32), 256, most_unique_bytes=1e9, most_read_bytes=2e9)
        assert whole.kv_bytes() <= 16e9 or len(whole.seq_lens) == 1
        assert len(part.seq_lens) == 1 or (part.kv_bytes() <= 1e9 and part.tokens * 2 * 32 * 256 * 2 <= 2e9)
        assert len(part.seq_lens) <= len(whole.seq_lens)


def test_every_family_meets_every_head_setting_in_a_set() -> None:
    cases = draw_set(5)
    assert len({case.key for case in cases}) == len(cases) == 300
    assert min(Counter(case.family for case in cases).values()) >= 12
    assert min(Counter(case.heads for case in cases).values()) >= 12
    assert {(case.family, case.heads) for case in cases} == {(f, h) for f in ALL_FAMILIES for h in ALL_HEADS}
    assert {(case.head_dim, case.kv_dtype) for case in cases} == {
        (128, "bf16"), (64, "bf16"), (256, "bf16"), (128, "fp8_e4m3"),
    }  # fmt: skip


def test_steady_outputs_are_met_at_a_uniform_point_and_a_start_is_even() -> None:
    rng = np.random.default_rng(0)
    assert np.mean(outputs_so_far(rng, "exponential", 1000, True, 20_000)) == pytest.approx(1000, rel=0.03)
    assert len(set(outputs_so_far(rng, "exponential", 1000, False, 50))) == 1
    assert len(set(outputs_so_far(rng, "equal", 1000, True, 50))) == 1
    assert np.std(outputs_so_far(rng, "log-normal", 1000, True, 1000)) > 200


@pytest.mark.parametrize("tree", [*PAT_TREES, *FASTTREE_TREES])
def test_listed_trees_are_those_that_explain_reads(tree: str) -> None:
    paths, seq_lens = tree_paths(tree)
    read = parse_tree(tree)
    assert seq_lens == read.seq_lens.tolist()
    assert [[segment[1:] for segment in path] for path in paths] == [[s[1:] for s in path] for path in read.paths]
    shared = [{r for r, path in enumerate(side) if segment in path} for side in (paths, read.paths)
              for segment in sorted({s for path in side for s in path})]  # fmt: skip
    assert sorted(map(sorted, shared[: len(shared) // 2])) == sorted(map(sorted, shared[len(shared) // 2 :]))
