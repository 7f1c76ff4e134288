"""The packs read off a plan are the planner's: they cover what each query sees once and account for every work item."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from sgl_prefix_attn.explain.batch import BatchDescription, Segment, describe, parse_tree
from sgl_prefix_attn.explain.packs import PRIVATE, item_classes, item_ends, packs_of

SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
H200 = DeviceModel.gpu(132)


def planned(batch: BatchDescription, device: DeviceModel = H200) -> tuple[PrefixForest, Plan]:
    forest = PrefixForest.from_paths(batch.paths, prefix_lens=(batch.seq_lens - batch.query_lens).tolist())
    return forest, Planner(SHAPE, device).plan(forest, batch.seq_lens, batch.query_lens)


@st.composite
def batches(draw: st.DrawFn) -> BatchDescription:
    """Random forests: every request continues some prefix of an earlier request's path, then has tokens of its own."""
    paths: list[list[Segment]] = []
    seq_lens, query_lens = [], []
    next_node = 0
    for _ in range(draw(st.integers(1, 24))):
        base = draw(st.sampled_from(paths)) if paths and draw(st.booleans()) else []
        path = list(base[: draw(st.integers(0, len(base)))])
        for _ in range(draw(st.integers(0, 3))):
            begin = path[-1][2] if path else 0
            path.append((next_node, begin, begin + draw(st.sampled_from([1, 16, 64, 512, 700, 4096]))))
            next_node += 1
        query_len = draw(st.sampled_from([1, 1, 1, 40]))
        paths.append(path)
        query_lens.append(query_len)
        seq_lens.append((path[-1][2] if path else 0) + query_len + draw(st.integers(0, 600)))
    return describe("random", paths, seq_lens, query_lens)


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([H200, DeviceModel.cpu(2)]))
def test_packs_cover_what_every_query_sees_exactly_once(batch: BatchDescription, device: DeviceModel) -> None:
    assert_seen_once(batch, device)


@pytest.mark.parametrize("decodes", [2, 3])
def test_an_extend_may_read_a_prefix_that_others_share_in_a_pack_of_its_own(decodes: int) -> None:
    # Its queries follow theirs, and its pieces end where the prefix ends.
    paths = [[(0, 0, 512), (1, 512, 576)], *[[(0, 0, 512)]] * decodes, *[[]] * 15]
    lens = [745, *[513] * decodes, *[1] * 15]
    assert_seen_once(describe("extend", paths, lens, [40, *[1] * (decodes + 15)]), H200)


def assert_seen_once(batch: BatchDescription, device: DeviceModel) -> None:
    forest, plan = planned(batch, device)
    packs = packs_of(plan, forest, batch.seq_lens)
    assert sum(pack.items for pack in packs) == len(plan.items)
    positions = batch.seq_lens[plan.query_request] - 1 - plan.query_back
    seen = np.zeros((plan.num_queries, int(batch.seq_lens.max())), int)
    for pack in packs:
        seen[pack.query_begin : pack.query_end, pack.kv_begin : pack.kv_end] += 1
    for query, position in enumerate(positions.tolist()):
        assert (seen[query, : position + 1] == 1).all()


@settings(max_examples=40, deadline=None)
@given(batches())
def test_a_shared_pack_belongs_to_a_node_of_all_its_requests(batch: BatchDescription) -> None:
    forest, plan = planned(batch)
    for pack in packs_of(plan, forest, batch.seq_lens):
        requests = set(plan.query_request[pack.query_begin : pack.query_end].tolist())
        if pack.node == PRIVATE:
            assert len(requests) == 1
        else:
            assert pack.kv_end == forest.node_end[pack.node]
            assert requests <= set(forest.order[forest.node_first[pack.node] : forest.node_last[pack.node]].tolist())


@settings(max_examples=40, deadline=None)
@given(batches())
def test_no_pack_is_cut_in_two(batch: BatchDescription) -> None:
    forest, plan = planned(batch)
    packs = packs_of(plan, forest, batch.seq_lens)
    # Two packs with the same queries, one after the other, would always be cheaper as one.
    assert max(Counter((pack.query_begin, pack.query_end, pack.kv_begin) for pack in packs).values()) == 1
    ends = {(pack.query_begin, pack.query_end, pack.kv_end) for pack in packs}
    assert not [pack for pack in packs if (pack.query_begin, pack.query_end, pack.kv_begin) in ends]


def test_one_prompt_many_requests() -> None:
    batch = parse_tree("1,10/4096,416")
    forest, plan = planned(batch)
    shared, *private = packs_of(plan, forest, batch.seq_lens)
    assert (shared.node, shared.queries, shared.kv_begin, shared.kv_end, shared.row_tiles) == (0, 10, 0, 4096, 1)
    assert shared.items > 1, "4096 tokens on 264 workers are split"
    assert [(p.node, p.queries, p.kv_begin, p.kv_end) for p in private] == [(PRIVATE, 1, 4096, 4512)] * 10


def test_a_pack_wider_than_the_largest_tile_has_several_row_tiles() -> None:
    batch = parse_tree("1,96/2048,64")
    forest, plan = planned(batch)
    shared = packs_of(plan, forest, batch.seq_lens)[0]
    assert (shared.queries, shared.row_tiles) == (96, 3), "96 queries x 4 heads a group = 3 tiles of 128 rows"


def test_open_ends_follow_the_current_lengths() -> None:
    batch = parse_tree("1,2/64,16")
    _, plan = planned(batch, replace(H200, item_overhead=0.0))
    assert sorted(set(item_ends(plan, batch.seq_lens).tolist())) == [64, 80]
    grown = item_ends(plan, batch.seq_lens + 5)
    assert sorted(set(grown.tolist())) == [64, 85], "shared ranges stay, tails grow"


def test_item_classes_add_up() -> None:
    batch = parse_tree("1,14/4096,416")
    forest, plan = planned(batch)
    shared, private = item_classes(plan, forest, batch.seq_lens, group=4)
    assert (shared.kind, shared.tile_rows, shared.kv_tokens) == ("shared", 64, 4096)
    assert shared.rows_filled == 56 / 64
    assert (private.kind, private.tile_rows, private.kv_tokens) == ("private", 8, 5824)
    assert private.rows_filled == 4 / 8
    assert shared.items + private.items == len(plan.items)
