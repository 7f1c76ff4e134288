"""The planner: every (query, visible position) is read by exactly one item, partials have slots of their own."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_prefix_attn.core import planner as planning
from sgl_prefix_attn.core.forest import PrefixForest, RadixMirror, int64_array
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, PlanError, Planner, grown_by
from tests.core.plan_checks import DEVICES, SHAPES, check_plan, check_statistics, random_forest


@pytest.mark.parametrize("seed", range(300))
def test_every_visible_position_is_read_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, device = SHAPES[seed % len(SHAPES)], DEVICES[seed % len(DEVICES)]
    new_tokens = int(rng.choice([1, 4, 200]))
    forest, seq_lens, query_lens = random_forest(rng, int(rng.choice([4, 30, 128])), new_tokens)
    if new_tokens == 4 and seed % 2:  # a verify step
        seq_lens, query_lens = seq_lens - query_lens + 4, np.full_like(query_lens, 4)
    planner = Planner(shape, device)
    plan = planner.plan(forest, seq_lens, None if new_tokens == 1 else query_lens)
    check_plan(plan, forest, seq_lens, query_lens)
    check_statistics(plan, planner, forest, seq_lens, query_lens)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_survives_decode_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forest, seq_lens, ones = random_forest(rng, 64)
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


def test_plans_of_batches_that_take_turns_are_reused() -> None:
    forests = [PrefixForest.from_paths([[(1, 0, 100)], [(1, 0, 100)]]) for _ in range(9)]
    lens, planner = np.array([120, 130]), Planner(ModelShape(8, 2, 64), DeviceModel.cpu(2))
    plans = [planner.plan(forest, lens) for forest in forests[:8]]
    for step in (1, 2):
        for forest, plan in zip(forests, plans, strict=False):
            assert planner.plan(forest, lens + step) is plan
            assert planner.kv_tokens.packed == plan.kv_tokens_packed + 2 * step
    planner.plan(forests[8], lens)  # in place of the first
    assert [planner.plan(forest, lens + 3) is plan for forest, plan in zip(forests[1:8], plans[1:], strict=True)] == [
        True
    ] * 7
    assert planner.plan(forests[0], lens + 3) is not plans[0]


@pytest.mark.parametrize("drafts", [2, 4, 70])
def test_a_plan_of_verify_steps_is_reused(drafts: int) -> None:
    """Each request grows by the drafts that were accepted; 70 drafts fill several tiles."""
    forest = PrefixForest.from_paths([[(1, 0, 300)], [(1, 0, 300)], []])
    lens, new = np.array([420, 430, 90]), np.full(3, drafts, dtype=np.int64)
    planner = Planner(ModelShape(8, 2, 64), DeviceModel.gpu(132, head_dim=64, group=4), max_growth=12)
    plan = planner.plan(forest, lens, new)
    grown = np.array([0, 12, 5])
    assert planner.plan(forest, lens + grown, new) is plan
    check_plan(plan, forest, lens + grown, new)
    reused = planner.kv_tokens
    assert planner.plan(forest, lens + grown, new + 1) is not plan
    fresh = Planner(planner.shape, planner.device)
    fresh.plan(forest, lens + grown, new)
    assert reused.unique == fresh.kv_tokens.unique
    assert reused.per_request == fresh.kv_tokens.per_request
    plan = planner.plan(forest, lens, new)
    assert planner.plan(forest, lens + 13, new) is not plan


def test_balance_ends_the_reuse_of_a_plan_before_the_growth_limit_does() -> None:
    # One worker's tail exceeds the even share long before 10,000 tokens have been added to each of three tails.
    forest = PrefixForest.from_paths([[], [], []])
    lens = np.array([256, 128, 128])
    planner = Planner(ModelShape(8, 1, 128), DeviceModel.gpu(66), max_growth=10_000)
    plan = planner.plan(forest, lens)
    reused = 0
    while planner.plan(forest, lens + reused + 1) is plan:
        reused += 1
    assert 16 <= reused < 1000


def test_what_is_no_forest_or_no_shape_is_refused() -> None:
    with pytest.raises(TypeError, match="forest"):
        Planner(ModelShape(8, 2, 64), DeviceModel.gpu(132))._native.plan(None, np.array([10]), None)
    with pytest.raises(ValueError, match="no multiple of kv_heads 0"):
        Planner(ModelShape(8, 0, 64), DeviceModel.gpu(132))


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "message"),
    [
        ([100, 130], None, "request 0: sequence length 100 is shorter than its shared prefix"),
        ([-5, 130], None, "request 0: sequence length -5"),
        ([120, 1 << 40], None, r"request 1: .* exceeds 2\^31 - 1"),
        ([120, 130], [1, 0], "request 1: query length 0 is not positive"),
        ([120, 130], [1, 31], "request 1: .* and its 31 new tokens"),
        ([2**31 - 1] * 2, [2**23, 2**23 + 1], r"request 1: with it the step has more than 2\^24 new tokens"),
        ([2**31 - 1] * 2, [2**31 - 200, 1], r"request 0: with it the step has more than 2\^24 new tokens"),
        ([-(2**63), 130], None, "request 0: sequence length -9223372036854775808"),
        ([120, 130], [1, 2**63 - 1], "request 1: .* and its 9223372036854775807 new tokens"),
        ([120], None, "seq_lens must have one entry for each of the 2 requests"),
        ([120, 130], [1], "query_lens must have one entry for each of the 2 requests"),
    ],
)
def test_bad_lengths_are_named(seq_lens: list[int], query_lens: list[int] | None, message: str) -> None:
    forest = PrefixForest.from_paths([[(1, 0, 100)], [(1, 0, 100)]])
    planner = Planner(SHAPES[0], DEVICES[0])
    with pytest.raises(ValueError, match=message):
        planner.plan(forest, np.array(seq_lens), None if query_lens is None else np.array(query_lens))


@pytest.mark.parametrize("kind", [ValueError, MemoryError, OverflowError, IndexError, RuntimeError, TypeError])
def test_whatever_the_native_planner_raises_is_a_plan_error(kind: type[Exception]) -> None:
    def fail(*_: object) -> None:
        raise kind("out of words")

    planner = Planner(SHAPES[0], DEVICES[0])
    planner._native = SimpleNamespace(plan=fail)  # type: ignore[assignment]
    with pytest.raises(PlanError, match="out of words") as raised:
        planner.plan(PrefixForest.from_paths([[]]), np.array([4]))
    assert isinstance(raised.value.__cause__, kind)


def test_partial_results_are_counted_in_64_bits() -> None:
    """As many workers and as wide tiles as there may be: a few splits for each worker, with 65,536 queries each."""
    device = replace(DeviceModel.cpu(1), workers=2**16, item_overhead=0.0, tile_rows=(2**16,), bandwidth=1e15)
    forest, lens = PrefixForest.from_paths([[(0, 0, 2**30)]] * 2**16), np.full(2**16, 2**30 + 1)
    with pytest.raises(PlanError, match=r"the step needs \d+ or more partial results; a plan has at most 2\^26"):
        Planner(ModelShape(1, 1, 128), device).plan(forest, lens)


def test_a_plan_is_not_reused_beyond_the_longest_sequence() -> None:
    planner, forest = Planner(SHAPES[0], DEVICES[0]), PrefixForest.from_paths([[]])
    planner.plan(forest, int64_array([2**31 - 3]))
    planner.plan(forest, int64_array([2**31 - 1]))
    with pytest.raises(PlanError, match=r"sequence length 2147483648 exceeds 2\^31 - 1"):
        planner.plan(forest, int64_array([2**31]))


def test_a_plan_that_memory_cannot_hold_is_a_plan_error() -> None:
    """In a process whose address space ends soon: as many query tokens as a step may have."""
    code = """
import resource
import numpy as np
from sgl_prefix_attn import DeviceModel, ModelShape, PlanError, Planner, PrefixForest
planner, forest = Planner(ModelShape(8, 2, 64), DeviceModel.gpu(132)), PrefixForest.from_paths([[]], prefix_lens=[0])
tokens = np.array([1 << 24])
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    planner.plan(forest, tokens, tokens)
except PlanError as error:
    print(type(error.__cause__).__name__, planner.plans_made)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["MemoryError", "0"], run.stderr


@pytest.mark.parametrize(("depth", "planned"), [(600, True), (4096, True), (4097, False), (100_000, False)])
def test_forests_are_planned_down_to_a_depth(depth: int, planned: bool) -> None:
    """Request i leaves after i + 1 nodes, the last two after all."""
    mirror = RadixMirror()
    ends = list(range(1, depth + 1))
    mirror.put(-1, 0, list(range(depth)), ends, leaf=True)
    last = int64_array([*range(depth), depth - 1])
    forest, planner = mirror.forest(last, last + 1), Planner(SHAPES[1], DEVICES[2])
    if planned:
        start = time.process_time()
        plan = planner.plan(forest, last + 4)
        assert time.process_time() - start < 0.05, "a pack joins a few nodes of a path; 0.15 s if it could join all"
        assert plan.num_queries == depth + 1
        assert plan.kv_tokens_packed < plan.kv_tokens_per_request / 4
        if depth < 1000:  # the check takes the square
            check_plan(plan, forest, last + 4, np.ones(depth + 1, dtype=np.int64))
    else:
        with pytest.raises(PlanError, match=f"the forest is {depth} nodes deep; the planner supports 4096"):
            planner.plan(forest, last + 4)


COUNTS = ("workers", "combine_rows", "combine_width", "narrow_parts", "narrow_per_worker")
RATES = ("bandwidth", "flops", "wide_flops", "lone_speedup")
TIMES = (
    "item_overhead", "narrow_overhead", "combine_latency", "combine_step", "deferred_combine", "deferred_combine_step",
    "widest_flops",
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "device", "message"),
    [
        (ModelShape(12, 5, 64), DEVICES[0], "q_heads 12 is no multiple of kv_heads 5"),
        (ModelShape(8, 8, 0), DEVICES[0], "head_dim is 0; expected 1 to 65536"),
        (SHAPES[0], DeviceModel(0, 1.0, 1.0, 0.0, 0.0, (16,)), "workers is 0; expected 1 to 65536"),
        (SHAPES[0], DeviceModel(1, -1.0, 1.0, 0.0, 0.0, (16,)), "bandwidth and flops must be positive"),
        (SHAPES[0], DeviceModel(1, 1.0, 1.0, 0.0, 0.0, (32, 16)), "tile_rows must ascend"),
        (SHAPES[0], DeviceModel(1, 1.0, 1.0, 0.0, 2.0, (16,)), "reread must lie in 0 .. 1"),
        (SHAPES[0], DeviceModel(1, 1.0, 1.0, 0.0, 1.0, (16,), overlap=1.5), "overlap must lie in 0 .. 1"),
        *((SHAPES[0], replace(DEVICES[2], **{name: value}), "finite")
          for name in RATES for value in (0.0, math.inf, math.nan, 1e-300, 1e300)),
        *((SHAPES[0], replace(DEVICES[2], **{name: value}), "finite")
          for name in TIMES for value in (-1.0, math.inf, math.nan)),
        # Tables by rows stay small, and products of figures fit 64 bits.
        *((SHAPES[0], replace(DEVICES[2], **{name: value}), rf"{name} is {value}; expected [01] to 65536")
          for name in (*COUNTS, "narrow_rows", "wide_rows") for value in (-1, 2**16 + 1, 2**31 - 1)),
        *((SHAPES[0], replace(DEVICES[2], **{name: 0}), f"{name} is 0; expected 1 to 65536") for name in COUNTS),
        *((SHAPES[0], replace(DEVICES[2], **{name: value}), rf"{name} is {value}; expected an integer from -2\^31")
          for name in (*COUNTS, "combine_fan_in", "wide_rows") for value in (2**31, -(2**31) - 1, 2**70)),
        (SHAPES[0], replace(DEVICES[2], combine_fan_in=0), "combine_fan_in is 0; expected 1 to 2147483647"),
        (SHAPES[0], replace(DEVICES[2], narrow_to_fill=99), "narrow_to_fill is 99; expected 1 to 8"),
        (SHAPES[0], replace(DEVICES[2], bandwidth="fast"), "bandwidth is 'fast'; expected a number"),
        (SHAPES[0], replace(DEVICES[2], tile_rows=(32, 2**31 - 1)), "a number of tile_rows is 2147483647; expected"),
        (SHAPES[0], replace(DEVICES[2], tile_rows=(32, 2**31)), "tile_rows is .*; expected integers from"),
        *((replace(ModelShape(8, 1, 64), **{name: 2**31 - 1}), DEVICES[0], f"{name} is 2147483647; expected 1 to 65536")
          for name in ("q_heads", "head_dim", "kv_bytes", "partial_bytes")),
        (ModelShape(8192, 8192, 64), DEVICES[0], "kv_heads is 8192; expected 1 to 4096"),
        (ModelShape(2**40, 1, 64), DEVICES[0], r"q_heads is 1099511627776; expected an integer from -2\^31"),
    ],
)  # fmt: skip
def test_bad_shapes_and_devices_are_named(shape: ModelShape, device: DeviceModel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Planner(shape, device)


@pytest.mark.parametrize("longest", [2**31 - 1, 2**31 - 17, 2**30 + 1])
def test_the_longest_sequences_are_split_without_overflow(longest: int) -> None:
    """Every position once, by splits that follow each other."""
    plan = Planner(ModelShape(8, 1, 128), DEVICES[2]).plan(PrefixForest.from_paths([[]]), int64_array([longest]))
    begins, ends = plan.items[:, planning.KV_BEGIN], plan.items[:, planning.KV_END]
    assert len(begins) > 100
    assert begins[0] == 0
    np.testing.assert_array_equal(ends[:-1], begins[1:])
    assert (begins[:-1] < begins[1:]).all()
    assert ends[-1] == planning.OPEN_END
    assert begins[-1] < longest


def test_an_overhead_that_dwarfs_the_work_orders_the_queue_somehow() -> None:
    """Rounding then leaves negative times."""
    device = replace(DeviceModel.gpu(132), narrow_overhead=1e30, lone_speedup=1e30)
    forest, lens = PrefixForest.from_paths([[(0, 0, 300)]] * 40), np.array([306, 4301] * 20)
    check_plan(Planner(ModelShape(8, 8, 64), device).plan(forest, lens), forest, lens, np.ones(40, dtype=np.int64))


@pytest.mark.parametrize(
    ("after", "growth", "grown"),
    [
        ([8, 10, 12], 3, True), ([5, 7, 9], 0, True), ([8, 10, 12], 2, False), ([8, 10, 13], 3, False),
        ([7, 10, 12], 3, False), ([8, 10], 3, False), ([8, 10, 12, 14], 3, False), ([], 3, False),
        ([8, 10, 12], 2**63 - 1, False),
    ],
)  # fmt: skip
def test_all_lengths_have_grown_alike(after: list[int], growth: int, grown: bool) -> None:
    before = np.array([5, 7, 9], dtype=np.int64)
    assert grown_by(np.array(after, dtype=np.int64), before, growth) is grown
    assert grown_by(np.array(after, dtype=np.int32), before, growth) is grown


def test_empty_batch() -> None:
    plan = Planner(SHAPES[0], DEVICES[0]).plan(PrefixForest.from_paths([]), np.zeros(0, dtype=np.int64))
    assert plan.items.shape == (0, 7)


def test_growth_is_bounded_by_the_setting() -> None:
    with pytest.raises(ValueError, match="max_growth -1 is negative"):
        Planner(SHAPES[0], DEVICES[0], max_growth=-1)
    assert Planner(SHAPES[0], DEVICES[0], max_growth=0).plans_made == 0
