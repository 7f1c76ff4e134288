"""Compares the sharing that a tracker reports with SGLang's own tree."""

from __future__ import annotations

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, StepPaths
from tests.support.small_scheduler import Batch, SmallScheduler


def shared_by_paths(scheduler: SmallScheduler, batch: Batch, prefix_lens: list[int]) -> dict[tuple[int, int], int]:
    """For each pair of live requests, the positions they share, by walking the tree from scratch."""
    reach = []
    for request, prefix in zip(batch.reqs, prefix_lens, strict=True):
        usable = request.finished_reason is None and request.last_node is not None
        reach.append([seg for seg in scheduler.path(request) if seg[2] <= prefix] if usable else [])
    shared = {}
    for a in range(len(reach)):
        for b in range(a + 1, len(reach)):
            common = 0
            for left, right in zip(reach[a], reach[b], strict=False):
                if left[0] != right[0]:
                    break
                common = left[2]
            shared[a, b] = common
    return shared


def shared_by_forest(forest: PrefixForest) -> dict[tuple[int, int], int]:
    paths = forest.paths()
    shared = {}
    for a in range(len(paths)):
        for b in range(a + 1, len(paths)):
            common = 0
            for left, right in zip(paths[a], paths[b], strict=False):
                if left != right:
                    break
                common = left[2]
            shared[a, b] = common
    return shared


def check(scheduler: SmallScheduler, tracker: BatchTracker, batch: Batch) -> StepPaths:
    """The tracker's forest is the tree's for all live requests, and what it calls shared is one and the same KV."""
    step = tracker.step(batch)
    assert isinstance(step, StepPaths), step
    live = [request.finished_reason is None for request in batch.reqs]
    lengths = batch.seq_lens_cpu.tolist()
    own = 0 if batch.forward_mode.is_target_verify() else 1  # lengths count the token of a decode step
    prefix = batch.prefix_lens if batch.prefix_lens is not None else [length - own for length in lengths]
    found, expected = shared_by_forest(step.forest), shared_by_paths(scheduler, batch, prefix)
    assert {pair: found[pair] for pair in found if live[pair[0]] and live[pair[1]]} == {
        pair: expected[pair] for pair in expected if live[pair[0]] and live[pair[1]]
    }
    forest = step.forest
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
