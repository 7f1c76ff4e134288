"""Random forests for the planner, and the check that a plan reads every visible position once."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.core import planner as planning
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner

Lengths = np.ndarray  # [num_requests] int64

SHAPES = [
    ModelShape(32, 32, 128),
    ModelShape(32, 8, 128),
    ModelShape(64, 8, 64),
    ModelShape(28, 4, 128),
    ModelShape(16, 1, 256),
    ModelShape(8, 2, 32, kv_bytes=4),
]
DEVICES = [
    DeviceModel.cpu(1),
    DeviceModel.cpu(2),
    DeviceModel.gpu(132),
    DeviceModel.gpu(132, max_tile_rows=16),
    DeviceModel.gpu(4),
    DeviceModel.gpu(132, group=16),
    DeviceModel.gpu(4, group=16),
]


def random_forest(
    rng: np.random.Generator, max_requests: int = 128, max_new_tokens: int = 1, scale: int = 300
) -> tuple[PrefixForest, Lengths, Lengths]:
    """A ragged forest of up to 8 levels; requests leave at any node, some have no path at all.

    Returns:
        the forest, KV lengths with the step's own tokens, and new tokens of each request.
    """
    num_requests = int(rng.integers(1, max_requests + 1))
    nodes: list[list[tuple[int, int, int]]] = [[]]
    for node in range(int(rng.integers(0, max(2, num_requests)))):
        path = nodes[int(rng.integers(len(nodes)))]
        if len(path) < 8:
            begin = path[-1][2] if path else 0
            nodes.append([*path, (node, begin, begin + int(rng.integers(1, rng.integers(2, scale))))])
    paths = [nodes[int(rng.integers(len(nodes)))] for _ in range(num_requests)]
    query_lens = rng.integers(1, max_new_tokens + 1, num_requests)
    if max_new_tokens > 1:
        query_lens[rng.random(num_requests) < 0.5] = 1
    ends = np.array([path[-1][2] if path else 0 for path in paths])
    seq_lens = ends + query_lens + rng.integers(0, scale, num_requests) * (rng.random(num_requests) < 0.7)
    return PrefixForest.from_paths(paths, prefix_lens=seq_lens - query_lens), seq_lens, query_lens


def slot_owners(forest: PrefixForest, request: int, length: int) -> np.ndarray:
    """[length] an id for the KV slot of each position: equal for two requests where they share it."""
    owners = np.arange(length, dtype=np.int64) + (request + 1) * 10_000_000
    node = forest.tail_node[request]
    while node >= 0:
        begin, end = forest.node_begin[node], forest.node_end[node]
        owners[begin:end] = np.arange(begin, end) + (int(node) + 1) * 100_000_000_000
        node = forest.node_parent[node]
    return owners


def check_plan(plan: Plan, forest: PrefixForest, seq_lens: np.ndarray, query_lens: np.ndarray) -> None:
    """Replays the plan on slot ids instead of numbers."""
    first_token = np.concatenate([[0], np.cumsum(query_lens)])
    assert sorted(plan.query_token.tolist()) == list(range(int(query_lens.sum())))
    np.testing.assert_array_equal(
        plan.query_token, first_token[plan.query_request] + query_lens[plan.query_request] - 1 - plan.query_back
    )
    positions = seq_lens[plan.query_request] - 1 - plan.query_back
    seen = [np.zeros(position + 1, dtype=np.int32) for position in positions]
    owners = [slot_owners(forest, request, int(seq_lens[request])) for request in range(forest.num_requests)]
    partials: list[list[tuple[int, int]]] = [[] for _ in positions]
    written = np.zeros(plan.num_partials, dtype=np.int32)
    for query_begin, query_count, request, kv_begin, kv_end, partial_begin, _tile in plan.items.tolist():
        last = query_begin + query_count - 1
        end = positions[last] + 1 if kv_end == planning.OPEN_END else kv_end
        assert kv_begin < end
        if kv_end == planning.OPEN_END:
            assert len(set(plan.query_request[query_begin : last + 1].tolist())) == 1
        for query in range(query_begin, last + 1):
            visible = min(end, positions[query] + 1)
            own = owners[plan.query_request[query]][kv_begin:visible]
            np.testing.assert_array_equal(own, owners[request][kv_begin:visible])
            seen[query][kv_begin:visible] += 1
            partial = partial_begin if partial_begin == planning.WRITE_THROUGH else partial_begin + query - query_begin
            partials[query].append((kv_begin, partial))
            if partial >= 0:
                written[partial] += 1
    for count in seen:
        assert (count == 1).all()
    assert (written == 1).all()
    combined = {}
    for index, query in enumerate(plan.combine_query.tolist()):
        combined[query] = plan.combine_partial[plan.combine_offset[index] : plan.combine_offset[index + 1]].tolist()
    for query, parts in enumerate(partials):
        expected = [partial for _, partial in sorted(parts)]
        assert combined.get(query, [planning.WRITE_THROUGH]) == expected


def check_statistics(
    plan: Plan, planner: Planner, forest: PrefixForest, seq_lens: np.ndarray, query_lens: np.ndarray
) -> None:
    tile = max(1, planner.device.tile_rows[-1] // (planner.shape.q_heads // planner.shape.kv_heads))
    assert plan.items[:, planning.QUERY_COUNT].max() <= tile
    unique = len(
        np.unique(
            np.concatenate([slot_owners(forest, request, int(length)) for request, length in enumerate(seq_lens)])
        )
    )
    per_request = sum(
        int(length) - max(0, int(new) - first - tile)
        for length, new in zip(seq_lens, query_lens, strict=True)
        for first in range(0, int(new), tile)
    )
    assert plan.kv_tokens_unique == unique
    assert plan.kv_tokens_per_request == per_request
    assert plan.kv_tokens_unique <= plan.kv_tokens_packed <= plan.kv_tokens_per_request
    last = plan.items[:, planning.QUERY_BEGIN] + plan.items[:, planning.QUERY_COUNT] - 1
    ends = seq_lens[plan.query_request[last]] - plan.query_back[last]
    ends = np.where(plan.items[:, planning.KV_END] == planning.OPEN_END, ends, plan.items[:, planning.KV_END])
    assert plan.kv_tokens_packed == (ends - plan.items[:, planning.KV_BEGIN]).sum()
