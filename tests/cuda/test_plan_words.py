"""The block of words that brings a plan to the device."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_prefix_attn import _native
from tests.cuda.cases import make_case

HEADER = 12


@pytest.mark.parametrize(("group", "rows_of_warps"), [(1, 8), (8, 8), (9, 8), (10, 16), (16, 16)])
def test_words_hold_the_plan_and_room_for_growing_tails(group: int, rows_of_warps: int) -> None:
    case = make_case(1, heads=(2 * group, 2), requests=12, levels=4)
    plan, growth = case.plan, 9
    words, kv_slots = _native.plan_words(plan, case.planned_lens, growth, group)
    num_items, num_queries, num_merges, *at, header_block_items = words[:HEADER].tolist()
    assert (num_items, num_queries, num_merges) == (len(plan.items), plan.num_queries, len(plan.merge_query))
    assert words[HEADER + 1] == plan.narrow_prevails
    # What takes a block comes before what takes a warp.
    items = plan.items[np.argsort(plan.items[:, 6] <= rows_of_warps, kind="stable")]
    assert header_block_items == (items[:, 6] > rows_of_warps).sum()
    arrays = [items.ravel(), None, plan.query_token, plan.query_request, plan.query_back, plan.merge_query,
              plan.merge_offset, plan.merge_slot]
    for offset, array in zip(at, arrays, strict=False):
        if array is not None:
            np.testing.assert_array_equal(words[offset : offset + len(array)], array)
    last = items[:, 0] + items[:, 1] - 1
    ends = case.planned_lens[plan.query_request[last]] - plan.query_back[last] + growth
    room = np.where(items[:, 4] == -1, ends, items[:, 4]) - items[:, 3]
    np.testing.assert_array_equal(words[at[1] : at[1] + num_items], np.cumsum(room) - room)
    assert kv_slots == room.sum()


def test_lengths_of_another_batch_are_refused() -> None:
    case = make_case(1)
    with pytest.raises(ValueError, match="one entry for each of the plan's 6 requests"):
        _native.plan_words(case.plan, np.ones(2, dtype=np.int64), 0, 1)
