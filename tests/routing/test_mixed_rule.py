"""When a mixed step runs packed: the rule on the batches that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernel.mixed_cases import draw_mixed, draw_wide
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import mixed
from sgl_prefix_attn.routing.measured import features_of
from tests.routing.test_features import features

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPE = ModelShape(32, 8, 128)


@pytest.mark.parametrize(
    ("name", "gain"), [("h100_1050572058", 2.1), ("h100_578527695", 2.2), ("wide_h200_4207958577", 1.4)]
)
def test_measured_steps_are_packed_where_that_is_faster(name: str, gain: float) -> None:
    results = json.loads((RESULTS / f"mixed_{name}.json").read_text(encoding="utf-8"))
    rows, draw = results["rows"], draw_wide if results.get("wide") else draw_mixed
    packed, lost = [], []
    for row, drawn in zip(rows, draw(results["seed"], len(rows)), strict=True):
        assert row["key"] == drawn.case.key
        new = drawn.query_lens
        ours, fa3 = (row["baselines"][name]["cold_us"] for name in ("prefixpack", "fa3"))
        step = features_of(row)
        pairs = int(new @ (drawn.case.lengths - new // 2))
        (packed if mixed.packs(step, drawn.case.shape, pairs) else lost).append(fa3 / ours)
    assert np.exp(np.log(packed).sum() / len(rows)) > gain
    assert min(packed) > 1.04
    assert np.median(lost) < 1.1


def test_the_arithmetic_of_a_long_private_chunk_and_unmeasured_shapes_are_left_to_stock() -> None:
    step = features([[], *[[(0, 0, 1800)]] * 200], [65536, *[2000] * 200])
    pairs = 8192 * (65536 - 4096)
    assert step.tokens > 4 * step.unique_tokens
    assert not mixed.packs(step, SHAPE, 2 * pairs)
    assert mixed.packs(step, SHAPE, pairs // 32)
    assert not any(mixed.packs(step, s, 0) for s in (ModelShape(32, 8, 64), ModelShape(32, 8, 128, kv_bytes=1)))


def test_steps_that_share_little_kv_are_left_to_stock() -> None:
    """However little they compute: two requests that share a token, and 40 with a short system prompt."""
    tiny, short = features([[(0, 0, 1)]] * 2, [18, 18]), features([[(0, 0, 8)]] * 40, [20] * 40)
    assert not any(mixed.packs(step, SHAPE, 1) for step in (tiny, short))
    more = features([[(0, 0, 64)]] * 20, [100] * 20)  # 5 MB with eight KV heads
    assert mixed.packs(more, SHAPE, 1)
    assert not mixed.packs(more, ModelShape(8, 2, 128), 1)
