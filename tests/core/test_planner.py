"""The planner: every (query, visible position) is read by exactly one item, partials have slots of their own."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import planner as planning
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner, grown_by

Batch = tuple[PrefixForest, np.ndarray, np.ndarray]

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


def random_batch(rng: np.random.Generator, max_requests: int = 128, max_new_tokens: int = 1, scale: int = 300) -> Batch:
    """A ragged forest of up to 8 levels; requests leave at any node, some have no path at all."""
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
    slots = np.zeros(plan.num_slots, dtype=np.int32)
    for query_begin, query_count, request, kv_begin, kv_end, slot_begin, _tile in plan.items.tolist():
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
            slot = slot_begin if slot_begin == planning.WRITE_THROUGH else slot_begin + query - query_begin
            partials[query].append((kv_begin, slot))
            if slot >= 0:
                slots[slot] += 1
    for count in seen:
        assert (count == 1).all()
    assert (slots == 1).all()
    merged = {}
    for index, query in enumerate(plan.merge_query.tolist()):
        merged[query] = plan.merge_slot[plan.merge_offset[index] : plan.merge_offset[index + 1]].tolist()
    for query, parts in enumerate(partials):
        expected = [slot for _, slot in sorted(parts)]
        assert merged.get(query, [planning.WRITE_THROUGH]) == expected


@pytest.mark.parametrize("seed", range(300))
def test_every_visible_position_is_read_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, device = SHAPES[seed % len(SHAPES)], DEVICES[seed % len(DEVICES)]
    new_tokens = int(rng.choice([1, 4, 200]))
    forest, seq_lens, query_lens = random_batch(rng, int(rng.choice([4, 30, 128])), new_tokens)
    planner = Planner(shape, device)
    plan = planner.plan(forest, seq_lens, None if new_tokens == 1 else query_lens)
    check_plan(plan, forest, seq_lens, query_lens)
    check_statistics(plan, planner, forest, seq_lens, query_lens)


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


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_survives_decode_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forest, seq_lens, ones = random_batch(rng, 64)
    planner = Planner(SHAPES[seed % len(SHAPES)], DEVICES[seed % len(DEVICES)], max_growth=10)
    first = planner.plan(forest, seq_lens)
    for step in range(1, 11):
        plan = planner.plan(forest, seq_lens + step)
        assert plan is first
        tokens = planner.kv_tokens
        grown = step * forest.num_requests
        assert tokens == (
            first.kv_tokens_packed + grown,
            first.kv_tokens_per_request + grown,
            first.kv_tokens_unique + grown,
        )
    check_plan(first, forest, seq_lens + 10, ones)
    assert planner.plan(forest, seq_lens + 11) is not first
    assert (planner.plans_made, planner.plans_reused) == (2, 10)


def test_what_ends_the_reuse_of_a_plan() -> None:
    forest = PrefixForest.from_paths([[(1, 0, 100)], [(1, 0, 100)]])
    same = PrefixForest.from_paths([[(1, 0, 100)], [(1, 0, 100)]])
    lens, ones = np.array([120, 130]), np.ones(2, dtype=np.int64)
    planner = Planner(ModelShape(8, 2, 64), DeviceModel.cpu(2))
    plan = planner.plan(forest, lens)
    assert planner.plan(forest, lens + 1) is plan
    assert planner.plan(same, lens + 1) is not plan
    plan = planner.plan(forest, lens)
    assert planner.plan(forest, lens, ones) is not plan
    plan = planner.plan(forest, lens)
    assert planner.plan(forest, lens - 1) is not plan


def test_balance_ends_the_reuse_of_a_plan_before_the_growth_limit_does() -> None:
    # One worker's tail is dearer than the even share long before 10,000 tokens have been added to each of three tails.
    forest = PrefixForest.from_paths([[], [], []])
    lens = np.array([256, 128, 128])
    planner = Planner(ModelShape(8, 1, 128), DeviceModel.gpu(66), max_growth=10_000)
    plan = planner.plan(forest, lens)
    reused = 0
    while planner.plan(forest, lens + reused + 1) is plan:
        reused += 1
    assert 16 <= reused < 1000


@pytest.mark.parametrize("seed", range(1000))
def test_packing_is_within_five_percent_of_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, device = SHAPES[seed % len(SHAPES)], DEVICES[(seed // 7) % len(DEVICES)]
    while True:
        forest, seq_lens, query_lens = random_batch(rng, 9, int(rng.choice([1, 1, 40])), int(rng.choice([12, 40, 600])))
        choices = (forest.node_parent >= 0).sum() + (forest.tail_node >= 0).sum()
        if forest.num_nodes and choices <= 13:
            break
    own, added_up, lowest = _native.packing_costs(
        forest.native,
        seq_lens,
        query_lens,
        _native.ModelShape(**vars(shape)),
        _native.DeviceModel(**vars(device)),
        exhaustive=True,
    )
    assert own == pytest.approx(added_up, rel=1e-9)
    assert lowest <= own * (1 + 1e-9)
    assert own <= 1.05 * lowest


def test_what_is_no_forest_or_no_shape_is_refused() -> None:
    lens, device = np.array([10]), _native.DeviceModel(**vars(DeviceModel.gpu(132)))
    with pytest.raises(TypeError, match="forest"):
        Planner(ModelShape(8, 2, 64), DeviceModel.gpu(132))._native.plan(None, lens, None)
    with pytest.raises(TypeError, match="forest"):
        _native.packing_costs(None, lens, None, _native.ModelShape(8, 2, 64, 2, 4), device, exhaustive=False)
    forest = PrefixForest.from_paths([[]])
    with pytest.raises(ValueError, match="no multiple of kv_heads 0"):
        _native.packing_costs(forest.native, lens, None, _native.ModelShape(8, 0, 64, 2, 4), device, exhaustive=False)


def test_the_price_of_partials_decides_by_group_size() -> None:
    # 100 tokens that two requests share: worth a partial at one head a group, not at sixteen. PAT's rule, which has
    # no group size, answers both alike.
    forest = PrefixForest.from_paths([[(1, 0, 100)], [(1, 0, 100)]])
    lens = np.array([140, 140])
    device = replace(DeviceModel.gpu(132), item_overhead=0.7e-6, flops=790e12)
    narrow = Planner(ModelShape(8, 8, 128, partial_bytes=2), device).plan(forest, lens)
    wide = Planner(ModelShape(128, 8, 128, partial_bytes=4), device).plan(forest, lens)
    assert narrow.kv_tokens_packed < narrow.kv_tokens_per_request
    assert wide.kv_tokens_packed == wide.kv_tokens_per_request
    assert wide.num_slots == 0


def greedy_finish(plan: Plan, planner: Planner, seq_lens: np.ndarray) -> tuple[float, float]:
    """(when the last worker is done, the even share) if workers take the queue in order, in KV tokens."""
    import heapq

    last = plan.items[:, planning.QUERY_BEGIN] + plan.items[:, planning.QUERY_COUNT] - 1
    ends = np.where(
        plan.items[:, planning.KV_END] == planning.OPEN_END,
        seq_lens[plan.query_request[last]] - plan.query_back[last],
        plan.items[:, planning.KV_END],
    )
    work = np.repeat(ends - plan.items[:, planning.KV_BEGIN], planner.shape.kv_heads).tolist()
    loads = [0] * planner.device.workers
    for item in work:
        heapq.heapreplace(loads, loads[0] + item)
    return max(loads), sum(work) / len(loads)


@pytest.mark.parametrize(
    ("lens", "limit"),
    [([8192] * 4, 1.15), ([32768], 1.15), ([32768, *[512] * 40], 1.25), ([1000 + 700 * i for i in range(30)], 1.15)],
)
def test_long_kv_is_split_until_the_workers_are_balanced(lens: list[int], limit: float) -> None:
    forest, seq_lens = PrefixForest.from_paths([[] for _ in lens]), np.array(lens)
    # Balance of tokens is what is looked at here; dear items are rightly cut less.
    planner = Planner(ModelShape(32, 8, 128), replace(DeviceModel.gpu(132), item_overhead=0.7e-6, flops=790e12))
    plan = planner.plan(forest, seq_lens)
    finish, even = greedy_finish(plan, planner, seq_lens)
    assert finish <= limit * even
    check_plan(plan, forest, seq_lens, np.ones(len(lens), dtype=np.int64))


def test_a_balanced_batch_is_not_split() -> None:
    forest = PrefixForest.from_paths([[] for _ in range(256)])
    plan = Planner(ModelShape(32, 8, 128), DeviceModel.gpu(132)).plan(forest, np.full(256, 1024))
    assert len(plan.items) == 256
    assert plan.num_slots == 0


def tiles_of_tails(heads: tuple[int, int], lens: list[int]) -> dict[int, set[int]]:
    """Row tiles on an H200 of requests that share nothing, by their length."""
    shape, seq_lens = ModelShape(*heads, 128), np.array(lens)
    plan = Planner(shape, DeviceModel.gpu(132, group=shape.group)).plan(
        PrefixForest.from_paths([[] for _ in lens]), seq_lens
    )
    found: dict[int, set[int]] = {length: set() for length in lens}
    for query_begin, *_, tile in plan.items.tolist():
        found[lens[plan.query_request[query_begin]]].add(tile)
    return found


@pytest.mark.parametrize("heads", [(64, 4), (16, 1), (96, 8), (20, 2)], ids=str)
def test_two_units_of_warps_take_a_tail_while_starting_sooner_makes_up_for_reading_it_twice(
    heads: tuple[int, int],
) -> None:
    # One worker's time: 6 us to take up an item, 1 us where it is two units for warps; 512 bytes of a token's K and V
    # at 1/264 of 4.3 TB/s, and 0.4 of that for the second unit.
    longest = int((6e-6 - 1e-6) / (0.4 * 512 / (4.3e12 / 264)))
    assert longest == 397
    assert tiles_of_tails(heads, [longest] * 512) == {longest: {16}}
    assert tiles_of_tails(heads, [longest + 1] * 512) == {longest + 1: {32}}


def reused_steps(planner: Planner, forest: PrefixForest, lens: np.ndarray) -> int:
    plan, steps = planner.plan(forest, lens), 0
    while planner.plan(forest, lens + steps + 1) is plan:
        steps += 1
    return steps


def test_what_blocks_take_is_planned_as_if_there_were_no_units_for_warps() -> None:
    shape, gpu = ModelShape(16, 1, 128), DeviceModel.gpu(132, group=16)
    blocks = replace(gpu, tile_rows=(32, 64, 128), narrow_rows=0, narrow_units=1)
    # Too long for warps: as far as the plan lasts, too.
    lens = np.array([5000, 3000, *[700] * 40])
    forest = PrefixForest.from_paths([[] for _ in lens])
    planners = [Planner(shape, device, max_growth=1000) for device in (gpu, blocks)]
    ours, theirs = (planner.plan(forest, lens).items for planner in planners)
    np.testing.assert_array_equal(ours, theirs)
    steps = [reused_steps(planner, forest, lens) for planner in planners]
    assert steps[0] == steps[1] < 1000
    # Short, but too few for warps.
    lens = np.array([*[410] * 4, *[350] * 40])
    forest = PrefixForest.from_paths([[] for _ in lens])
    ours, theirs = (planner.plan(forest, lens).items for planner in planners)
    np.testing.assert_array_equal(ours, theirs)


def test_pieces_of_a_long_tail_are_no_short_tails() -> None:
    shape, lens = ModelShape(16, 1, 128), np.array([6000, *[100] * 400])
    plan = Planner(shape, DeviceModel.gpu(132, group=16)).plan(PrefixForest.from_paths([[] for _ in lens]), lens)
    pieces = plan.items[plan.query_request[plan.items[:, planning.QUERY_BEGIN]] == 0]
    ends = np.where(pieces[:, planning.KV_END] == planning.OPEN_END, 6000, pieces[:, planning.KV_END])
    assert (ends - pieces[:, planning.KV_BEGIN]).max() <= 397
    assert set(pieces[:, planning.TILE_ROWS]) == {32}
    assert np.count_nonzero(plan.items[:, planning.TILE_ROWS] == 16) == 400


@pytest.mark.parametrize("heads", [(32, 32), (16, 8), (28, 4), (32, 4)], ids=str)
def test_warps_take_tails_but_for_those_of_too_many_partials(heads: tuple[int, int]) -> None:
    # Up to 32 of the shortest pieces of 128 tokens; one warp would combine the partials of a longer one.
    assert tiles_of_tails(heads, [4_000, *[100] * 511]) == {4_000: {8}, 100: {8}}
    assert tiles_of_tails(heads, [100_000, *[100] * 511]) == {100_000: {32}, 100: {8}}


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11])
def test_groups_of_one_unit_are_planned_for_one_device(group: int) -> None:
    """Up to eight heads, or more that cannot be halved: no price depends on the group."""
    assert DeviceModel.gpu(132, group=group) == DeviceModel.gpu(132)
    assert DeviceModel.gpu(132).narrow_units == 1


def test_a_few_short_tails_among_long_ones_go_to_blocks_like_them() -> None:
    short, long = 300, 2000
    assert tiles_of_tails((64, 4), [*[short] * 300, *[long] * 50]) == {short: {32}, long: {32}}
    assert tiles_of_tails((64, 4), [*[short] * 400, *[long] * 50]) == {short: {16}, long: {32}}


def test_wide_tiles_give_way_sooner_while_most_workers_have_none() -> None:
    """Of one KV head there are few tiles. Narrower ones read the same KV, at once and from the cache."""
    planner = Planner(ModelShape(16, 1, 128), DeviceModel.gpu(132, group=16))

    def tile_rows(requests: int, groups: int, shared: int, own: int) -> set[int]:
        paths = [[(request * groups // requests, 0, shared)] for request in range(requests)]
        lens = np.full(requests, shared + own, dtype=np.int64)
        return set(planner.plan(PrefixForest.from_paths(paths), lens).items[:, 6].tolist())

    assert tile_rows(10, 1, 4000, 400) == {32}, "FastTree's ninth: 140 tiles, where wide ones would be 46"
    assert tile_rows(256, 4, 264, 32) == {16, 64}, "as its second: half of the workers have one, the rest do tails"


def test_a_tail_that_has_grown_long_is_planned_for_a_block() -> None:
    forest, lens = PrefixForest.from_paths([[] for _ in range(512)]), np.full(512, 370)
    planner = Planner(ModelShape(64, 4, 128), DeviceModel.gpu(132, group=16))
    tiles = []
    for grown in range(0, 129, 16):
        tiles.append(set(planner.plan(forest, lens + grown).items[:, planning.TILE_ROWS]))
    assert tiles[0] == {16}
    assert tiles[-1] == {32}
    assert planner.plans_reused > 0


def test_the_queue_begins_with_the_dearest_and_keeps_sibling_tiles_together() -> None:
    path = [(1, 0, 2048)]
    forest = PrefixForest.from_paths([path] * 200)
    seq_lens = np.full(200, 2100)
    plan = Planner(ModelShape(32, 8, 128), DeviceModel.gpu(8)).plan(forest, seq_lens)
    shared = plan.items[plan.items[:, planning.KV_END] != planning.OPEN_END]
    assert len(shared) >= 7
    np.testing.assert_array_equal(plan.items[: len(shared)], shared)
    changes = (np.diff(shared[:, planning.KV_BEGIN]) != 0).sum()
    assert changes == len(np.unique(shared[:, planning.KV_BEGIN])) - 1


def test_same_batch_same_plan() -> None:
    rng = np.random.default_rng(5)
    forest, seq_lens, query_lens = random_batch(rng, 100, 20)
    plans = [Planner(SHAPES[1], DEVICES[2]).plan(forest, seq_lens, query_lens) for _ in range(2)]
    for column in ("items", "query_token", "merge_slot", "merge_offset"):
        np.testing.assert_array_equal(getattr(plans[0], column), getattr(plans[1], column))


def test_very_deep_trees_are_planned_in_time() -> None:
    # Every request leaves one node further down: 600 levels.
    path: list[tuple[int, int, int]] = []
    paths = []
    for node in range(600):
        path = [*path, (node, 10 * node, 10 * node + 10)]
        paths.append(path)
    forest = PrefixForest.from_paths(paths)
    seq_lens = np.array([path[-1][2] + 5 for path in paths])
    planner = Planner(ModelShape(32, 8, 128), DeviceModel.gpu(132))
    plan = planner.plan(forest, seq_lens)
    assert planner.plan_seconds < 0.05
    assert plan.kv_tokens_packed < plan.kv_tokens_per_request / 4
    check_plan(plan, forest, seq_lens, np.ones(600, dtype=np.int64))


def test_empty_batch() -> None:
    plan = Planner(SHAPES[0], DEVICES[0]).plan(PrefixForest.from_paths([]), np.zeros(0, dtype=np.int64))
    assert plan.items.shape == (0, 7)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "message"),
    [
        ([100, 130], None, "request 0: sequence length 100 is shorter than its shared prefix"),
        ([-5, 130], None, "request 0: sequence length -5"),
        ([120, 1 << 40], None, r"request 1: .* exceeds 2\^31 - 1"),
        ([120, 130], [1, 0], "request 1: query length 0 is not positive"),
        ([120, 130], [1, 31], "request 1: .* and its 31 new tokens"),
        ([120], None, "seq_lens must have one entry for each of the 2 requests"),
        ([120, 130], [1], "query_lens must have one entry for each of the 2 requests"),
    ],
)
def test_bad_lengths_are_named(seq_lens: list[int], query_lens: list[int] | None, message: str) -> None:
    forest = PrefixForest.from_paths([[(1, 0, 100)], [(1, 0, 100)]])
    planner = Planner(SHAPES[0], DEVICES[0])
    with pytest.raises(ValueError, match=message):
        planner.plan(forest, np.array(seq_lens), None if query_lens is None else np.array(query_lens))


@pytest.mark.parametrize(
    ("shape", "device", "message"),
    [
        (ModelShape(12, 5, 64), DEVICES[0], "q_heads 12 is no multiple of kv_heads 5"),
        (ModelShape(8, 8, 0), DEVICES[0], "head_dim 0 is not positive"),
        (SHAPES[0], DeviceModel(0, 1.0, 1.0, 0.0, 0.0, (16,)), "workers 0 is not positive"),
        (SHAPES[0], DeviceModel(1, -1.0, 1.0, 0.0, 0.0, (16,)), "bandwidth and flops must be positive"),
        (SHAPES[0], DeviceModel(1, 1.0, 1.0, 0.0, 0.0, (32, 16)), "tile_rows must ascend"),
        (SHAPES[0], DeviceModel(1, 1.0, 1.0, 0.0, 2.0, (16,)), "reread must lie in 0 .. 1"),
        (SHAPES[0], DeviceModel(1, 1.0, 1.0, 0.0, 1.0, (16,), narrow_units=0), "narrow_units 0 is not positive"),
        (SHAPES[0], DeviceModel(1, 1.0, 1.0, 0.0, 1.0, (16,), overlap=1.5), "overlap must lie in 0 .. 1"),
    ],
)
def test_bad_shapes_and_devices_are_named(shape: ModelShape, device: DeviceModel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Planner(shape, device)


def test_growth_is_bounded_by_the_setting() -> None:
    with pytest.raises(ValueError, match="max_growth -1 is negative"):
        Planner(SHAPES[0], DEVICES[0], max_growth=-1)
    assert math.isfinite(Planner(SHAPES[0], DEVICES[0], max_growth=0).plan_seconds)


@pytest.mark.parametrize(
    ("after", "growth", "grown"),
    [
        ([8, 10, 12], 3, True),
        ([5, 7, 9], 0, True),
        ([8, 10, 12], 2, False),
        ([8, 10, 13], 3, False),
        ([7, 10, 12], 3, False),
        ([8, 10], 3, False),
        ([8, 10, 12, 14], 3, False),
        ([], 3, False),
    ],
)
def test_all_lengths_have_grown_alike(after: list[int], growth: int, grown: bool) -> None:
    before = np.array([5, 7, 9], dtype=np.int64)
    assert grown_by(np.array(after, dtype=np.int64), before, growth) is grown
    assert grown_by(np.array(after, dtype=np.int32), before, growth) is grown
