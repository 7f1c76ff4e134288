"""What the planner chooses: packs, tiles and splits by their costs."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.native_build import ROOT, built_module
from benchmarks.simulator import makespan
from benchmarks.workloads import draw_set
from sgl_prefix_attn import _native
from sgl_prefix_attn.core import planner as planning
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.gpu import H200, planner_model
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from tests.core.plan_checks import DEVICES, SHAPES, check_plan, random_forest


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """What no user needs is not in the native module. Compiled in ten seconds of a core."""
    own = Path(__file__).with_name("plan_checks.cpp")
    sources = [own, *(ROOT / "csrc" / "plan" / name for name in ("packing.cpp", "queue_model.cpp"))]
    return built_module("plan_checks", sources, options=["-O2"], depends=[own])


@pytest.mark.parametrize("seed", range(1000))
def test_packing_is_within_five_percent_of_the_best_of_all(seed: int, check: ModuleType) -> None:
    rng = np.random.default_rng(seed)
    shape, device = SHAPES[seed % len(SHAPES)], DEVICES[(seed // 7) % len(DEVICES)]
    while True:
        forest, seq_lens, query_lens = random_forest(
            rng, 9, int(rng.choice([1, 1, 40])), int(rng.choice([12, 40, 600]))
        )
        choices = (forest.node_parent >= 0).sum() + (forest.tail_node >= 0).sum()
        if forest.num_nodes and choices <= 13:
            break
    native = forest.native, seq_lens, query_lens, _native.ModelShape(**asdict(shape)), device.native()
    own, added_up, lowest = check.packing_costs(*native)
    assert own == pytest.approx(added_up, rel=1e-9)
    assert lowest <= own * (1 + 1e-9)
    assert own <= 1.05 * lowest


@pytest.mark.parametrize("seed", range(300))
def test_an_estimate_of_the_queue_with_a_limit_is_not_later_and_exact_below_it(seed: int, check: ModuleType) -> None:
    """When the last worker is done, which splits are chosen by."""
    rng = np.random.default_rng(seed)
    longest = 10 ** rng.uniform(-6, -4)
    work_tiles = [
        (longest * rng.uniform(0.01, 1, int(rng.integers(0, 600))) ** rng.uniform(0.3, 3)).tolist() for _ in range(2)
    ]
    batch = (int(rng.integers(1, 265)), *work_tiles, longest, bool(rng.random() < 0.5))
    exact = check.finish(*batch, math.inf)
    for share in (0.1, 0.5, 0.8, 0.9, 0.95, 0.97, 0.99, 0.999, 1.001, 1.05, 2):
        limit = share * exact
        found = check.finish(*batch, limit)
        assert found == exact if exact < limit else limit <= found <= exact


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
    assert wide.num_partials == 0


def greedy_finish(plan: Plan, planner: Planner, seq_lens: np.ndarray) -> tuple[float, float]:
    """(when the last worker is done, the even share) if workers take the queue in order, in KV tokens."""
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
    [([8192] * 4, 1.2), ([32768], 1.15), ([32768, *[512] * 40], 1.4), ([1000 + 700 * i for i in range(30)], 1.15)],
)
def test_long_kv_is_split_until_the_workers_are_balanced(lens: list[int], limit: float) -> None:
    forest, seq_lens = PrefixForest.from_paths([[] for _ in lens]), np.array(lens)
    # Balance of tokens is what is looked at here: workers that compute all the time, and cheap items.
    device = replace(DeviceModel.gpu(132), item_overhead=0.7e-6, flops=130e12, lone_speedup=1.0)
    planner = Planner(ModelShape(32, 8, 128), device)
    plan = planner.plan(forest, seq_lens)
    finish, even = greedy_finish(plan, planner, seq_lens)
    assert finish <= limit * even
    check_plan(plan, forest, seq_lens, np.ones(len(lens), dtype=np.int64))


def test_a_balanced_batch_is_not_split() -> None:
    forest = PrefixForest.from_paths([[] for _ in range(256)])
    plan = Planner(ModelShape(32, 8, 128), DeviceModel.gpu(132)).plan(forest, np.full(256, 1024))
    assert len(plan.items) == 256
    assert plan.num_partials == 0


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


@pytest.mark.parametrize("heads", [(64, 4), (96, 8), (20, 2)], ids=str)
def test_short_tails_of_many_heads_are_for_two_warps_and_long_ones_for_a_cta(heads: tuple[int, int]) -> None:
    """Two warps begin sooner than a CTA, but both read the KV of a tail."""
    assert tiles_of_tails(heads, [100] * 512) == {100: {16}}
    assert tiles_of_tails(heads, [1000] * 512) == {1000: {32}}


def reused_steps(planner: Planner, forest: PrefixForest, lens: np.ndarray) -> int:
    plan, steps = planner.plan(forest, lens), 0
    while planner.plan(forest, lens + steps + 1) is plan:
        steps += 1
    return steps


def test_what_ctas_take_is_planned_as_if_no_work_tile_were_for_warps() -> None:
    shape, gpu = ModelShape(16, 1, 128), DeviceModel.gpu(132, group=16)
    ctas_only = replace(gpu, tile_rows=(32, 64, 128), narrow_rows=0, narrow_parts=1)
    # Too long for warps: as far as the plan lasts, too.
    lens = np.array([5000, 3000, *[700] * 40])
    forest = PrefixForest.from_paths([[] for _ in lens])
    planners = [Planner(shape, device, max_growth=1000) for device in (gpu, ctas_only)]
    ours, theirs = (planner.plan(forest, lens).items for planner in planners)
    np.testing.assert_array_equal(ours, theirs)
    steps = [reused_steps(planner, forest, lens) for planner in planners]
    assert steps[0] == steps[1] < 1000
    # Short, but too few for warps.
    lens = np.array([*[410] * 4, *[350] * 40])
    forest = PrefixForest.from_paths([[] for _ in lens])
    ours, theirs = (planner.plan(forest, lens).items for planner in planners)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("heads", [(32, 32), (16, 8), (28, 4), (32, 4)], ids=str)
def test_warps_take_tails_but_for_those_of_too_many_partials(heads: tuple[int, int]) -> None:
    # Up to 32 of the shortest KV splits of 128 tokens; one warp would combine the partials of a longer one.
    assert tiles_of_tails(heads, [4_000, *[100] * 511]) == {4_000: {8}, 100: {8}}
    assert tiles_of_tails(heads, [100_000, *[100] * 511]) == {100_000: {32}, 100: {8}}


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11])
def test_groups_of_one_work_tile_are_planned_for_one_device(group: int) -> None:
    """Up to eight heads, or more that cannot be halved: no cost depends on the group."""
    assert DeviceModel.gpu(132, group=group) == DeviceModel.gpu(132)
    assert DeviceModel.gpu(132).narrow_parts == 1


@pytest.mark.parametrize(("requests", "shared", "own"), [(193, 1456, 35), (210, 752, 74), (33, 8000, 40)])
def test_no_lone_warp_reads_what_a_pack_leaves_over(requests: int, shared: int, own: int) -> None:
    """The last tile of a pack has few rows. A warp would read the whole range for them, long after all others."""
    lens = np.full(requests, shared + own)
    plan = Planner(ModelShape(32, 4, 128), DeviceModel.gpu(132, group=8)).plan(
        PrefixForest.from_paths([[(1, 0, shared)] for _ in lens]), lens
    )
    narrow = plan.items[plan.items[:, planning.TILE_ROWS] == 8]
    ends = np.where(narrow[:, planning.KV_END] == planning.OPEN_END, shared + own, narrow[:, planning.KV_END])
    assert (ends - narrow[:, planning.KV_BEGIN]).max(initial=0) <= shared / 2


def test_few_tiles_are_made_narrower() -> None:
    """Of one KV head there are few tiles. Narrower ones read the same KV at once."""
    planner = Planner(ModelShape(16, 1, 128), DeviceModel.gpu(132, group=16))
    paths = [[(1, 0, 4000)] for _ in range(10)]
    plan = planner.plan(PrefixForest.from_paths(paths), np.full(10, 4400))
    assert plan.items[:, planning.TILE_ROWS].max() < 128


def test_warps_for_narrow_items_make_plans_faster() -> None:
    """Of drawn batches, by the simulator; they are 10 % slower in few."""
    better = []
    for case in draw_set(7, 90):
        device = planner_model(H200, case.shape, code=90)
        no_warps = replace(device, tile_rows=(32, 64, 128), narrow_rows=0, narrow_parts=1)
        if case.head_dim > 128:
            continue
        plans = [Planner(case.shape, it).plan(case.forest(), case.lengths) for it in (device, no_warps)]
        ours, theirs = (makespan(plan, case.lengths, case.shape, device).seconds for plan in plans)
        better.append(np.log(theirs / ours))
    assert np.mean(better) > 0.03
    assert np.mean(np.array(better) < -0.1) < 0.1


def test_the_queue_begins_with_the_longest_and_keeps_sibling_tiles_together() -> None:
    path = [(1, 0, 2048)]
    forest = PrefixForest.from_paths([path] * 200)
    seq_lens = np.full(200, 2100)
    plan = Planner(ModelShape(32, 8, 128), DeviceModel.gpu(8)).plan(forest, seq_lens)
    shared = plan.items[plan.items[:, planning.KV_END] != planning.OPEN_END]
    assert len(shared) >= 7
    np.testing.assert_array_equal(plan.items[: len(shared)], shared)
    changes = (np.diff(shared[:, planning.KV_BEGIN]) != 0).sum()
    assert changes == len(np.unique(shared[:, planning.KV_BEGIN])) - 1


def test_a_plan_may_have_more_kinds_of_tiles_than_are_told_apart() -> None:
    """Groups of 2 to 27 requests on 128 to 6,889 tokens, and workers enough to split all ranges."""
    groups = list(product(range(2, 28), (int(2 ** (7 + step / 4)) for step in range(24))))
    paths = [[(group, 0, length)] for group, (size, length) in enumerate(groups) for _ in range(size)]
    forest = PrefixForest.from_paths(paths)
    seq_lens = np.array([path[0][2] + 1 for path in paths])
    device = replace(DeviceModel.cpu(1 << 16), bandwidth=1e15, flops=1e17)
    items = Planner(ModelShape(1, 1, 128), device).plan(forest, seq_lens).items
    shared = items[items[:, planning.KV_END] != planning.OPEN_END]
    read = (shared[:, planning.KV_END] - shared[:, planning.KV_BEGIN]).sum()
    assert read == sum(length for _, length in groups)
    assert len(shared) > len(groups)
