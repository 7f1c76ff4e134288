"""The packs read off a plan are the planner's: they cover what each query sees once and account for every work item."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from sgl_prefix_attn.explain.batch import BatchDescription, Segment, describe
from sgl_prefix_attn.explain.packs import PRIVATE, packs_of

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
