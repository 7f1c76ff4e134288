"""The block of words that brings a plan to the device."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.core.step_buffers import StepBuffers, StepLimits, serialize_plan
from tests.cuda.cases import decode_batch, document, make_case

HEADER = 12
DEFERRED = 16  # of the header: queries whose combine is deferred, where their records lie, parts of a row (base 2)
RECORD = 32  # words of a record


@pytest.mark.parametrize(("group", "rows_of_warps"), [(1, 8), (8, 8), (9, 8), (10, 16), (16, 16)])
def test_words_hold_the_plan_and_room_for_growing_tails(group: int, rows_of_warps: int) -> None:
    case = make_case(1, heads=(2 * group, 2), requests=12, levels=4)
    plan, growth = case.plan, 9
    made = _native.serialize_plan(plan, case.planned_lens, growth=growth, group=group)
    words, kv_slots = made.words, made.kv_slots
    num_items, num_queries, num_combines, *at, header_cta_items = words[:HEADER].tolist()
    assert (num_items, num_queries, num_combines) == (len(plan.items), plan.num_queries, len(plan.combine_query))
    assert words[HEADER + 1] == plan.mostly_narrow
    # What takes a CTA comes before what takes a warp.
    items = plan.items[np.argsort(plan.items[:, 6] <= rows_of_warps, kind="stable")]
    assert header_cta_items == (items[:, 6] > rows_of_warps).sum()
    queries = plan.query_token, plan.query_request, plan.query_back
    arrays = [items.ravel(), None, *queries, plan.combine_query, plan.combine_offset, plan.combine_partial]
    for offset, array in zip(at, arrays, strict=False):
        if array is not None:
            np.testing.assert_array_equal(words[offset : offset + len(array)], array)
    last = items[:, 0] + items[:, 1] - 1
    ends = case.planned_lens[plan.query_request[last]] - plan.query_back[last] + growth
    room = np.where(items[:, 4] == -1, ends, items[:, 4]) - items[:, 3]
    np.testing.assert_array_equal(words[at[1] : at[1] + num_items], np.cumsum(room) - room)
    assert kv_slots == room.sum()


def combine_lists(words: np.ndarray, num_lists: int) -> list[list[int]]:
    offset_at, slot_at = words[HEADER + 2 : HEADER + 4]
    offset = words[offset_at : offset_at + num_lists + 1]
    return [words[slot_at + first : slot_at + end].tolist() for first, end in itertools.pairwise(offset)]


def item_columns(words: np.ndarray) -> np.ndarray:
    """[4, num_items]: first KV slot, list, parent, group slot."""
    return words[words[4] : words[4] + 4 * words[0]].reshape(4, -1)


def test_query_tiles_of_a_prefill_share_one_copy_of_its_kv_slots() -> None:
    """Requests 1 and 2 read no position twice, and have a list for each item."""
    lens, new = np.array([3000, 9000, 9500]), np.array([1500, 1, 1])
    shape, paths = ModelShape(16, 2, 128), ((), *([((0, 0, 4000), (leaf, 4000, 8800)) for leaf in (1, 2)]))
    plan = Planner(shape, DeviceModel.gpu(132, group=8)).plan(PrefixForest.from_paths(paths), lens, new)
    made = serialize_plan(plan, lens, 5, shape)
    words, kv_slots = made.words, made.kv_slots
    items = words[words[3] : words[3] + 7 * words[0]].reshape(-1, 7)
    first, tiles = item_columns(words)[0], items[:, 2] == 0
    assert tiles.sum() > 1500 * 8 // 128
    assert len(set(first[tiles] - items[tiles, 3])) == 1
    ends = np.where(items[:, 4] < 0, lens[items[:, 2]] + 5, items[:, 4])
    assert kv_slots == 3005 + (ends - items[:, 3])[~tiles].sum()


def test_many_splits_of_an_item_form_groups() -> None:
    """Every partial is summed exactly once, through its group or in its query's list, and groups are even."""
    requests = 6
    case = document(requests, 4000, num_sms=60)
    plan = case.plan
    made = _native.serialize_plan(plan, case.planned_lens, growth=0, group=8)
    words = made.words
    _, lists, parents, group_partials = item_columns(words)
    grouped = parents >= 0
    assert grouped.any()
    assert made.combine_lists == lists[grouped].max() + requests
    assert made.combine_lists <= _native.most_combine_lists(queries=requests, partials=plan.num_partials)
    lists_of_queries = combine_lists(words, len(plan.combine_query))
    groups = combine_lists(words, int(lists[grouped].max()) + requests)[len(plan.combine_query) :]
    assert {len(group) for group in groups[:-requests]} == {8}  # the next multiple of four after the root of some 50
    summed = {group[0]: group for group in groups}
    for combine, roots in enumerate(lists_of_queries):
        slots = [slot for root in roots for slot in summed.get(root, [root])]
        assert slots == plan.combine_partial[plan.combine_offset[combine] : plan.combine_offset[combine + 1]].tolist()
        assert len(roots) <= 16
    items = words[words[3] : words[3] + 7 * words[0]].reshape(-1, 7)
    for item, index, parent, slot in zip(
        items[grouped], lists[grouped], parents[grouped], group_partials[grouped], strict=True
    ):
        group = groups[index - len(plan.combine_query)]
        assert group[0] == slot
        assert item[5] in group
        assert slot in lists_of_queries[parent]


@pytest.mark.parametrize("warp_ctas", [0, 1, 264])
def test_deferred_lists_have_one_entry_more_than_partials(warp_ctas: int) -> None:
    """So no arriver is the last one; the longest combines are deferred first."""
    case = document(16, 1000, num_sms=10)
    plan = case.plan
    words = _native.serialize_plan(plan, case.planned_lens, growth=0, group=8, kv_heads=1, warp_ctas=warp_ctas).words
    count, at, part_bits = words[DEFERRED : DEFERRED + 3]
    assert count == {0: 0, 1: 0, 264: 16}[warp_ctas]  # one CTA's eight warps are too few for 128 rows
    lists = combine_lists(words, len(plan.combine_query))
    assert at % RECORD == 0 or count == 0, "a record lies in one line of the cache"
    assert part_bits == 2  # at most 128 rows
    records = words[at : at + RECORD * count].reshape(-1, RECORD)
    deferred = {int(record[0]): record for record in records}
    for combine, slots in enumerate(lists):
        expected = plan.combine_partial[plan.combine_offset[combine] : plan.combine_offset[combine + 1]].tolist()
        if combine not in deferred:
            assert slots == expected
            continue
        _, slots_at, partials, token, *inline = deferred[combine].tolist()
        assert slots[:-1] == expected
        assert (partials, token) == (len(expected), plan.query_token[plan.combine_query[combine]])
        assert words[slots_at:][:partials].tolist() == expected
        assert inline == (expected + [-1] * 28)[:28]


@pytest.mark.parametrize(("requests", "parts"), [(8, 4), (16, 2), (32, 2), (48, 1)])
def test_few_deferred_rows_have_parts(requests: int, parts: int) -> None:
    """By the number of rows, and not by the launch."""
    batch = decode_batch([6000] * requests, 5000)
    plan = make_case(1, heads=(32, 4), batch=batch, num_sms=132).plan
    for warp_ctas in (264, 1000):
        words = _native.serialize_plan(plan, batch[1], growth=0, group=8, kv_heads=4, warp_ctas=warp_ctas).words
        assert words[DEFERRED] == requests
        assert 1 << words[DEFERRED + 2] == parts


@pytest.mark.parametrize("heads", [(8, 1), (32, 4)], ids=str)
def test_buffers_hold_a_record_for_each_query(heads: tuple[int, int]) -> None:
    """Though they are just large enough for the plan's queries, items and partials."""
    case = document(64, 5000, heads=heads)
    plan, lens = case.plan, case.planned_lens
    made = serialize_plan(plan, lens, 3, case.shape, warp_ctas=264)
    words, kv_slots = made.words, made.kv_slots
    assert words[DEFERRED] == 64
    limits = StepLimits(plan.num_queries, len(plan.items), kv_slots, plan.num_partials)
    buffers = StepBuffers(case.shape, torch.device("cpu"), limits)
    buffers.warp_ctas = 264
    buffers.load(plan, lens, 3)
    np.testing.assert_array_equal(buffers._words[: len(words)].numpy(), words)


def test_few_splits_form_no_groups() -> None:
    case = make_case(1, heads=(8, 2), requests=12, levels=4)
    words = _native.serialize_plan(case.plan, case.planned_lens, growth=0, group=4).words
    assert (item_columns(words)[2] == -1).all()
    assert words[HEADER + 2 : HEADER + 4].tolist() == words[9:11].tolist()


@pytest.mark.parametrize(
    ("tokens", "warp_ctas", "warps"),
    [
        (512, 4, 5),  # ten tails, two KV heads: one round of 20 warps and not of 32
        (512, 0, 8),  # a launch of unknown size
        (64, 4, 8),   # short work tiles are bound by latency: the more at once the better
    ],
)  # fmt: skip
def test_words_say_how_many_warps_take_part(tokens: int, warp_ctas: int, warps: int) -> None:
    case = make_case(1, batch=decode_batch([tokens] * 10))
    assert (case.plan.items[:, 6] == 8).all()
    assert len(case.plan.items) == 10
    words = _native.serialize_plan(
        case.plan, case.planned_lens, growth=0, group=4, kv_heads=2, warp_ctas=warp_ctas
    ).words
    assert words[HEADER] == warps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 0}, "kv_heads is 0 and group 4; they have to be at least 1"),
        ({"group": 0}, "kv_heads is 2 and group 0; they have to be at least 1"),  # of fewer query heads than KV heads
        ({"kv_heads": 2**31 - 1}, "kv_heads is 2147483647 and group 4; .* their product at most"),
        ({"warp_ctas": -1}, "growth is 0 and warp_ctas -1; they have to be at least 0"),
        ({"growth": -1}, "growth is -1 and warp_ctas 4; they have to be at least 0"),
    ],
    ids=str,
)
def test_launches_that_cannot_be_are_refused(options: dict[str, int], message: str) -> None:
    case = make_case(1)
    with pytest.raises(ValueError, match=message):
        _native.serialize_plan(
            case.plan, case.planned_lens, **{"growth": 0, "group": 4, "kv_heads": 2, "warp_ctas": 4, **options}
        )


@pytest.mark.parametrize("length", [-1, 2**31, -(2**63)])
def test_lengths_that_cannot_be_are_refused(length: int) -> None:
    case = make_case(1)
    lens = case.planned_lens.copy()
    lens[2] = length
    with pytest.raises(ValueError, match=f"request 2: seq_lens is {length}; it has to be"):
        _native.serialize_plan(case.plan, lens, growth=0, group=4)
