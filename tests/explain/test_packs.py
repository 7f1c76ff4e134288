"""The packs read off a plan are the planner's: they cover what each query sees once and account for every work item."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.explain.packs import PRIVATE, packs_of
from tests.core.plan_checks import random_forest

SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)


@pytest.mark.parametrize("seed", range(60))
def test_packs_cover_what_every_query_sees_once_and_belong_to_a_node_of_all_their_requests(seed: int) -> None:
    forest, seq_lens, query_lens = random_forest(np.random.default_rng(seed), 24, (1, 40)[seed % 2], scale=700)
    device = (DeviceModel.gpu(132), DeviceModel.cpu(2))[seed // 2 % 2]
    plan = Planner(SHAPE, device).plan(forest, seq_lens, query_lens)
    packs = packs_of(plan, forest, seq_lens)
    assert sum(pack.items for pack in packs) == len(plan.items)
    positions = seq_lens[plan.query_request] - 1 - plan.query_back
    seen = np.zeros((plan.num_queries, int(seq_lens.max())), int)
    for pack in packs:
        seen[pack.query_begin : pack.query_end, pack.kv_begin : pack.kv_end] += 1
        requests = set(plan.query_request[pack.query_begin : pack.query_end].tolist())
        if pack.node == PRIVATE:
            assert len(requests) == 1
        else:
            assert pack.kv_end == forest.node_end[pack.node]
            assert requests <= set(forest.order[forest.node_first[pack.node] : forest.node_last[pack.node]].tolist())
    for query, position in enumerate(positions.tolist()):
        assert (seen[query, : position + 1] == 1).all()
