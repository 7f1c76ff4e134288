"""When a mixed step runs packed: the rule on the batches that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernel.mixed_cases import draw_mixed
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import mixed
from sgl_prefix_attn.routing.features import StepFeatures
from tests.routing.test_features import features

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPE = ModelShape(32, 8, 128)


@pytest.mark.parametrize("seed", [1050572058, 578527695])
def test_measured_steps_are_packed_where_that_is_faster(seed: int) -> None:
    rows = json.loads((RESULTS / f"mixed_h100_{seed}.json").read_text(encoding="utf-8"))["rows"]
    packed, lost = [], []
    for row, drawn in zip(rows, draw_mixed(seed, len(rows)), strict=True):
        assert row["key"] == drawn.case.key
        new = drawn.query_lens
        ours, fa3 = (row["baselines"][name]["cold_us"] for name in ("prefixpack", "fa3"))
        step = StepFeatures(**row["step"])
        (packed if mixed.packs(step, SHAPE, int(new @ (drawn.case.lengths - new // 2))) else lost).append(fa3 / ours)
    assert len(packed) > 0.6 * len(rows)
    assert min(packed) > 1.05
    assert np.median(lost) < 1.1


def test_the_arithmetic_of_a_long_private_chunk_and_unmeasured_shapes_are_left_to_stock() -> None:
    step = features([[], *[[(0, 0, 1800)]] * 200], [65536, *[2000] * 200])
    pairs = 8192 * (65536 - 4096)
    assert step.tokens > 4 * step.unique_tokens
    assert not mixed.packs(step, SHAPE, pairs)
    assert mixed.packs(step, SHAPE, pairs // 32)
    assert not any(mixed.packs(step, s, 0) for s in (ModelShape(32, 8, 64), ModelShape(32, 8, 128, kv_bytes=1)))
