"""What is known of a step before it is planned: counted from forest and lengths, and by the slow definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures

Path = list[tuple[int, int, int]]


def features(paths: list[Path], seq_lens: list[int]) -> StepFeatures:
    lengths = np.array(seq_lens, dtype=np.int64)
    return StepFeatures.of(ForestFacts.of(PrefixForest.from_paths(paths, prefix_lens=(lengths - 1).tolist())), lengths)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), min_size=1, max_size=12))
def test_unique_positions_of_any_small_forest(requests: list[tuple[int, int]]) -> None:
    # Prefixes of one chain of nodes, 10 positions each, and tails of the requests' own.
    paths = [[(node, 10 * node, 10 * node + 10) for node in range(depth)] for depth, _ in requests]
    seq_lens = [10 * depth + tail for depth, tail in requests]
    positions = {(node, offset) for path in paths for node, begin, end in path for offset in range(begin, end)}
    step = features(paths, seq_lens)
    assert step.tokens == sum(seq_lens)
    assert step.unique_tokens == len(positions) + sum(tail for _, tail in requests)


def test_lengths_of_another_batch_are_refused() -> None:
    facts = ForestFacts.of(PrefixForest.from_paths([[], []]))
    with pytest.raises(ValueError, match="seq_lens has 3 entries for a forest of 2 requests"):
        StepFeatures.of(facts, np.array([1, 2, 3], dtype=np.int64))
