"""How much GPU memory the buffers of packed steps take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.core.step_buffers import StepLimits, serialize_plan
from sgl_prefix_attn.sglang_plugin.execution.buffer_sizes import LargestSteps, step_limits

SHAPE = ModelShape(32, 8, 128)
DECODES = LargestSteps(rows=256, context=1000, growth=24, graph_batch=64, graph_tokens=64)


def test_decode_steps_of_the_largest_graph() -> None:
    assert step_limits(DECODES, SHAPE, 128) == StepLimits(
        queries=256, items=4 * 256 + 8192, kv_slots=64 * 1024, partials=6 * 64 + 4096
    )


def test_without_graphs_the_pool_says_how_many_requests_run_up_to_a_limit() -> None:
    without = replace(DECODES, graph_batch=0, graph_tokens=0)
    assert step_limits(without, SHAPE, 128).kv_slots == 256 * 1024
    many = step_limits(replace(without, rows=4096), SHAPE, 128)
    assert (many.queries, many.kv_slots, many.partials) == (4096, 512 * 1024, 6 * 512 + 4096)


@pytest.mark.parametrize(("widest", "tiles"), [(128, 1), (32, 1), (16, 2), (2, 8)])
def test_a_verify_step_has_room_for_each_tile_of_a_request(widest: int, tiles: int) -> None:
    drafts = replace(DECODES, drafts=8, graph_tokens=64 * 8)
    limits = step_limits(drafts, SHAPE, widest)
    assert (limits.queries, limits.kv_slots) == (256 * 8, tiles * 64 * (1024 + 2 * 8))
    assert limits.partials == 4 * 64 * 8 + 4096


@pytest.mark.parametrize(
    ("heads", "mixed", "packed"),
    [((64, 8), 4096, 16384), ((32, 8), 4096, 16384), ((16, 2), 16384, 16384), ((8, 1), 32768, 32768)],
)
def test_few_heads_leave_room_for_splits_of_a_prefill_chunk(heads: tuple[int, int], mixed: int, packed: int) -> None:
    chunk = replace(DECODES, new_tokens=8192)
    shape = ModelShape(*heads, 128)
    without = step_limits(DECODES, shape, 128)
    limits = step_limits(chunk, shape, 128)
    assert limits.partials - without.partials == mixed
    assert (limits.queries, limits.items) == (without.queries + 8192, without.items + 4 * 8192)
    assert limits.kv_slots == without.kv_slots
    always = step_limits(replace(chunk, packs_prefill=True), shape, 128)
    assert always.partials - without.partials == packed


@pytest.mark.parametrize("drafts", [1, 8])
def test_a_plan_without_splits_of_the_largest_graph_always_fits(drafts: int) -> None:
    """It is what runs where a graph has no fallback: all requests as long as can be, and nothing shared.

    Bounds of DFLASH's verify steps have the drafts of two steps, of which a row of the scheduler's table holds one.
    """
    steps = replace(DECODES, drafts=drafts, graph_tokens=64 * drafts)
    model = replace(DeviceModel.gpu(132, group=SHAPE.group), workers=1)
    limits = step_limits(steps, SHAPE, model.tile_rows[-1])
    lens = np.full(64, steps.context + (2 * drafts if drafts > 1 else 0))
    plan = Planner(SHAPE, model).plan(PrefixForest.from_paths([()] * 64), lens, np.full(64, drafts))
    made = serialize_plan(plan, lens, steps.growth, SHAPE)
    assert made.kv_slots <= limits.kv_slots
    assert made.combine_lists <= limits.combine_lists
    assert len(plan.items) <= limits.items
    assert (plan.num_queries, plan.num_partials) == (64 * drafts, 0)
