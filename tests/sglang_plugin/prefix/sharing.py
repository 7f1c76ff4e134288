"""Compares the sharing that a tracker reports with SGLang's own tree."""

from __future__ import annotations

import itertools

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, StepPaths
from tests.support.small_scheduler import Batch, SmallScheduler


def shared(paths: list[list[tuple[int, int, int]]]) -> dict[tuple[int, int], int]:
    """For each pair of requests, the positions that their paths share."""
    found = {}
    for (a, one), (b, other) in itertools.combinations(enumerate(paths), 2):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        found[a, b] = max((left[2] for left, _ in same), default=0)
    return found


def shared_by_tree(scheduler: SmallScheduler, batch: Batch, prefix_lens: list[int]) -> dict[tuple[int, int], int]:
    """The same of live requests by walking the tree from scratch."""
    reach = []
    for request, prefix in zip(batch.reqs, prefix_lens, strict=True):
        usable = request.finished_reason is None and request.last_node is not None
        reach.append([seg for seg in scheduler.path(request) if seg[2] <= prefix] if usable else [])
    return shared(reach)


def check_structure(forest: PrefixForest) -> None:
    """Parents stand before children and enclose their members, of which each node has at least two."""
    assert sorted(forest.order.tolist()) == list(range(forest.num_requests))
    for node in range(forest.num_nodes):
        parent = forest.node_parent[node]
        assert parent < node
        assert forest.node_begin[node] == (forest.node_end[parent] if parent >= 0 else 0)
        assert forest.node_end[node] > forest.node_begin[node]
        members = forest.node_last[node] - forest.node_first[node]
        assert members >= 2
        if parent >= 0:
            assert forest.node_first[parent] <= forest.node_first[node]
            assert forest.node_last[node] <= forest.node_last[parent]
            assert members < forest.node_last[parent] - forest.node_first[parent]
    ends = [forest.node_end[node] if node >= 0 else 0 for node in forest.tail_node]
    assert forest.tail_begin.tolist() == ends


def check(scheduler: SmallScheduler, tracker: BatchTracker, batch: Batch) -> StepPaths:
    """The tracker's forest is the tree's for all live requests, and what it calls shared is one and the same KV."""
    step = tracker.step(batch)
    assert isinstance(step, StepPaths), step
    live = [request.finished_reason is None for request in batch.reqs]
    lengths = batch.seq_lens_cpu.tolist()
    own = 0 if batch.forward_mode.is_target_verify() else 1  # lengths count the token of a decode step
    prefix = batch.prefix_lens if batch.prefix_lens is not None else [length - own for length in lengths]
    found, expected = shared(step.forest.paths()), shared_by_tree(scheduler, batch, prefix)
    assert {pair: found[pair] for pair in found if live[pair[0]] and live[pair[1]]} == {
        pair: expected[pair] for pair in expected if live[pair[0]] and live[pair[1]]
    }
    forest = step.forest
    check_structure(forest)
    rows = scheduler.pool.req_to_token
    for node in range(forest.num_nodes):
        members = forest.order[forest.node_first[node] : forest.node_last[node]]
        assert forest.node_request[node] in members
        assert live[forest.node_request[node]]
        begin, end = forest.node_begin[node], forest.node_end[node]
        stands_for_all = rows[batch.reqs[forest.node_request[node]].kv.req_pool_idx, begin:end]
        for member in members:
            if live[member]:
                assert (rows[batch.reqs[member].kv.req_pool_idx, begin:end] == stands_for_all).all()
    return step
