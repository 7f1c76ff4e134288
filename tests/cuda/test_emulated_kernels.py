"""The GPU kernels' own code, run on a CPU lane by lane, against dense attention.

What this shows: indices, masks, fragments, swizzles, the ring of stages and its waits, slots, combines, the queue. What
only a GPU shows: speed, memory ordering, that the compiler and the hardware agree with the emulated instructions.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from tests.cuda.cases import Case, check, decode_batch, make_case, same
from tests.cuda.emulated import GROWTH, emulate, same_bits, with_tile_rows

FP8_OF_128 = {"kv_dtype": torch.float8_e4m3fn, "head_dim": 128}
GROUPS = ((2, 2), (8, 2), (16, 1), (24, 2), (10, 1), (11, 1), (5, 1), (14, 2))


@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    "options",
    [
        *({"seed": heads[0], "heads": heads} for heads in GROUPS),
        *({"heads": (4, 2), "max_new_tokens": 70, "window_left": window, **FP8_OF_128} for window in (-1, 7, 64)),
    ],
    ids=str,
)
def test_ragged_forests(emulation: ModuleType, options: dict[str, Any], late_copies: bool) -> None:
    case = make_case(**{"seed": 1, **options})
    check(case, emulate(emulation, case, late_copies=late_copies, layers=2))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (16, 1), (24, 2), (11, 1), (64, 2)], ids=str)
def test_whoever_brings_the_last_partial_combines_to_the_same_bits(emulation, heads, head_dim):
    """CTAs before warps: these combine. Warps before CTAs: those do, of what is in memory and what is still near."""
    group = heads[0] // heads[1]
    prefix = 480 if group == 32 else 160  # worth the partials of so many heads
    batch = decode_batch(prefix + 7 * np.arange(1, 13), prefix)
    case = make_case(heads[0] + 1, heads=heads, head_dim=head_dim, batch=batch)
    of_ctas = case.plan.items[:, 6] > 8 * _native.head_halves(group)
    assert (case.plan.items[of_ctas, 5] >= 0).any(), "CTAs have partials to combine"
    assert of_ctas.all() == (group in (11, 32)), "warps have tails, but of odd and of the largest groups"
    same_bits(emulation, case, orders=[{"warps_first": True}])


def test_division_by_a_known_number(emulation: ModuleType) -> None:
    most = 2**31 - 1
    for number in (*range(1, 260), 1000, 2**16 - 1, 2**16, 2**16 + 1, 2**30, most - 1, most):
        last = most // number * number  # the largest multiple
        for dividend in (0, 1, number - 1, number, number + 1, last - 1, last, most):
            if 0 <= dividend <= most:
                assert emulation.quotient(dividend, number) == dividend // number, (dividend, number)


@pytest.mark.parametrize(
    "options",
    [
        *({"head_dim": size, "dtype": dtype} for size in (64, 128, 256) for dtype in (torch.bfloat16, torch.float16)),
        {"grown": GROWTH},  # the plan was made for shorter tails
        {"logit_cap": 3.0},
        {"with_sinks": True},
        {"with_sinks": True, "sink_offset": 150.0},  # so far above all logits that 2^(sink - maximum) is no float
        *({"max_new_tokens": 20, "window_left": window} for window in (0, 7, 64, 100, 2**31 - 1)),
        # Extend over a shared prefix, and mixed batches.
        *({"seed": seed, "heads": (4, 2), "max_new_tokens": 70} for seed in range(4)),
        *({"seed": seed, "heads": (4, 2), "max_new_tokens": 64, "trees": True} for seed in range(3)),
    ],
    ids=str,
)
def test_variants_of_ragged_forests(emulation: ModuleType, options: dict[str, Any]) -> None:
    case = make_case(**{"seed": 3, **options})
    check(case, emulate(emulation, case, layers=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8_kv(emulation: ModuleType, head_dim: int, dtype: torch.dtype) -> None:
    """Rows of work tiles for warps and for CTAs, with a scale of the values."""
    case = make_case(
        64, heads=(8, 1), head_dim=head_dim, dtype=dtype, kv_dtype=torch.float8_e4m3fn, v_scale=0.37, requests=6
    )
    rows = set(case.plan.items[:, 6].tolist())
    assert rows > {8} if head_dim <= 128 else rows <= {32, 64}
    check(case, emulate(emulation, case))


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(64, None), *((head_dim, torch.float8_e4m3fn) for head_dim in (64, 128, 256))]
)
@pytest.mark.parametrize("queries", [1, 3, 5, 9, 17, 20])
def test_every_tile_of_the_table(emulation, queries, head_dim, kv_dtype):
    """`queries` requests of group 8 share one node: 8 .. 160 rows, so tiles of 16, 32, 64, 128 and 128 + 32."""
    batch = decode_batch(200 + np.arange(1, queries + 1), 200)
    case = make_case(queries, heads=(8, 1), head_dim=head_dim, kv_dtype=kv_dtype, batch=batch)
    check(case, emulate(emulation, case))


def test_every_fp8_number_is_read_as_it_is(emulation: ModuleType) -> None:
    """Values of one visible position are the output: all but NaN, which here is no number either."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    options: dict[str, Any] = {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn, "batch": decode_batch([1])}
    case = make_case(5, heads=(2, 1), head_dim=256, **options)
    case.pool.v_cache.view(torch.uint8)[case.pool.slots_of(0), 0] = torch.arange(256, dtype=torch.uint8)
    out, _ = emulate(emulation, case)
    torch.testing.assert_close(out[0, 0].float(), numbers.float(), atol=0, rtol=0, equal_nan=True)


def wide_case(queries: int = 16, shared: int = 200, *, head_dim: int = 128, rows: int = 128, **options: Any) -> Case:
    """Decode of `queries` requests of group 8 that share a node, whatever tile the planner chose for it done in one of
    `rows` rows that has products of a warpgroup."""
    batch = decode_batch(shared + np.arange(1, queries + 1), shared)
    case = make_case(shared, heads=(8, 1), head_dim=head_dim, batch=batch, **options)
    assert case.plan.items[:, 6].max() > 8
    return with_tile_rows(case, 64 if head_dim > 128 else rows)  # with head_dim 256 a CTA has one warpgroup


@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("head_dim", "shared"),
    [(128, 64), (128, 127), (128, 128), (128, 129), (128, 320), (128, 500), (64, 65), (64, 500), (256, 31), (256, 200)],
)
def test_products_of_a_warpgroup(emulation: ModuleType, head_dim: int, shared: int, late_copies: bool) -> None:
    """KV tiles of 64 (head_dim 256: 32), of which two or three are at hand: one, the last whole or not, and several.
    Each warpgroup has rows of its own, or half of the keys."""
    for options in ({}, {"queries": 8, "rows": 64}):
        case = wide_case(shared=shared, head_dim=head_dim, **options)
        check(case, emulate(emulation, case, late_copies=late_copies))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float16, "head_dim": 64},
        {"dtype": torch.float16, "head_dim": 256},
        {"window_left": 70, "head_dim": 64},
        {"window_left": 70, "head_dim": 256},
        {"logit_cap": 3.0},
        {"window_left": 0},
        {"window_left": 70},
        {"with_sinks": True},
        {"queries": 9},
        {"queries": 40},
        *({"queries": 8, "rows": 64, "window_left": window, "with_sinks": window > 0} for window in (0, 70)),
    ],
    ids=str,
)
def test_variants_of_products_of_a_warpgroup(emulation: ModuleType, options: dict[str, Any]) -> None:
    case = wide_case(**options)
    check(case, emulate(emulation, case))


@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    "options",
    [
        {"shared": 128},
        {"shared": 129, "dtype": torch.float16},
        {"shared": 320, "window_left": 70, "v_scale": 0.37},
        {"queries": 7},  # of the two warpgroups, one without rows
        {"queries": 40, "shared": 100, "head_dim": 64},
        {"shared": 500, "head_dim": 64, "window_left": 70},
        {"shared": 31, "head_dim": 256},
        {"shared": 200, "head_dim": 256, "dtype": torch.float16, "v_scale": 0.37},
    ],
    ids=str,
)
def test_products_of_a_warpgroup_with_fp8_kv(emulation: ModuleType, options: dict[str, Any], late_copies: bool) -> None:
    """One KV tile, the last whole or not, and several: converted while products are in flight."""
    case = wide_case(kv_dtype=torch.float8_e4m3fn, **options)
    check(case, emulate(emulation, case, late_copies=late_copies))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 600])
def test_lengths_around_the_kv_tile(emulation: ModuleType, length: int) -> None:
    case = make_case(length, heads=(4, 1), batch=decode_batch([length, 1]))
    check(case, emulate(emulation, case))


def test_more_partials_of_an_item_than_a_cta_has_room_for(emulation: ModuleType) -> None:
    case = make_case(7, heads=(1, 1), batch=decode_batch([16_600], new=128), num_sms=264)
    assert case.plan.num_partials > _native.combine_room
    check(case, emulate(emulation, case, fan_in=1 << 20))


def test_more_partials_of_a_query_than_the_lanes_of_a_row_have_at_a_time(emulation: ModuleType) -> None:
    case = make_case(8, heads=(64, 1), batch=decode_batch([16_000]), num_sms=250)
    assert case.plan.num_partials > 100
    check(case, emulate(emulation, case, fan_in=1 << 20))


@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("heads", [(8, 2), (32, 2)], ids=str)
def test_few_ctas_take_part_where_most_of_the_work_is_in_tails(emulation, heads, late_copies):
    """One prefix for CTAs, 24 tails of 300 for warps: the work tiles are dealt to half of the CTAs."""
    prefix = 160 if heads == (32, 2) else 64
    case = make_case(2, heads=heads, batch=decode_batch([prefix + 300] * 24, prefix))
    assert case.plan.mostly_narrow
    assert (case.plan.items[:, 6] > 16).any()
    assert (case.plan.items[:, 6] == (16 if heads == (32, 2) else 8)).any()
    check(case, emulate(emulation, case, ctas=2, late_copies=late_copies))


@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("heads", [(16, 1), (24, 2)], ids=str)
def test_short_tails_of_large_groups_are_for_warps_and_long_ones_for_blocks(emulation, heads, late_copies):
    """At this bandwidth the sooner start of a warp makes up for about 140 tokens that two work tiles read."""
    prefix, tails = 300, np.array([20, 260, 90, 150, 400, 190, 180, 170])
    case = make_case(4, heads=heads, batch=decode_batch(prefix + tails, prefix), eager=False, bandwidth=8.192e9)
    own = case.plan.items[case.plan.items[:, 3] >= prefix]
    tail_of_item = tails[case.plan.query_request[own[:, 0]]]
    assert set(tail_of_item) == set(tails)
    np.testing.assert_array_equal(own[:, 6], np.where(tail_of_item < 140, 16, 32))
    check(case, emulate(emulation, case, late_copies=late_copies))


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (16, 1)], ids=str)
def test_a_window_that_has_left_shared_items_behind(emulation: ModuleType, heads: tuple[int, int]) -> None:
    case = make_case(1, heads=heads, window_left=7, batch=decode_batch(260 + np.arange(4), 200))
    assert len(case.plan.items) > 4
    check(case, emulate(emulation, case))


@pytest.mark.parametrize(
    ("work_tiles", "tokens", "warps"),
    [
        (2400, 1024, 5),  # two rounds of 1,320 warps instead of 2,112 and then 288
        (1584, 1024, 6),  # one full round
        (1200, 1024, 5),  # one round of 1,320
        (2400, 32, 8),    # short work tiles are bound by latency: the more at once the better
        (2400, 0, 8),     # of various lengths: the short ones come last and even it out
        (0, 0, 8),
    ],
)  # fmt: skip
def test_work_tiles_of_one_length_fill_their_rounds(emulation, work_tiles, tokens, warps):
    """On an H200, with 264 CTAs of eight warps."""
    assert emulation.active_warps(work_tiles, tokens) == warps


@pytest.mark.parametrize(
    ("cta_tiles", "mostly_narrow", "warps"),
    [
        (0, False, 4),     # 24 warps in any of the 264 CTAs
        (260, False, 6),   # in the four that are free, so that no tile waits for the CTA tiles
        (262, False, 4),   # two hold 16 only: eight tiles wait in any case
        (600, True, 4),    # the CTA tiles leave half of the CTAs free
    ],
)  # fmt: skip
def test_work_tiles_beside_cta_tiles_do_not_wait_for_them(emulation, cta_tiles, mostly_narrow, warps):
    assert emulation.active_warps(24, 1872, cta_tiles, mostly_narrow) == warps


def verify_case(drafts: int, heads: tuple[int, int], **options: Any) -> Case:
    """A verify step: two pairs of requests that share a prefix, and one with nothing but drafts."""
    paths = [[(0, 0, 90), (1, 90, 150)], [(0, 0, 90), (1, 90, 150)], [(0, 0, 90)], [(0, 0, 90)], []]
    committed = np.array([163, 150, 97, 90, 0])
    batch = (paths, committed + drafts, np.full(5, drafts, dtype=np.int64))
    return make_case(drafts, heads=heads, batch=batch, **options)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("drafts", [2, 3, 4, 8, 17, 33, 63, 64])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (16, 1)], ids=str)
def test_verify_steps(emulation: ModuleType, heads: tuple[int, int], drafts: int, trees: bool) -> None:
    case = verify_case(drafts, heads, trees=trees)
    check(case, emulate(emulation, case, late_copies=drafts % 2 == 0))


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 128},
        {"head_dim": 256},
        {"head_dim": 128, "kv_dtype": torch.float8_e4m3fn},
        {"num_sms": 60},  # splits among the drafts
        {"with_sinks": True, "logit_cap": 3.0},
        {"grown": GROWTH},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", [5, 40])
def test_variants_of_trees(emulation: ModuleType, drafts: int, options: dict[str, Any]) -> None:
    case = verify_case(drafts, (8, 2), trees=True, **options)
    check(case, emulate(emulation, case))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_warp_masks_hidden_drafts_before_its_last_loads(emulation: ModuleType, kv_dtype: torch.dtype) -> None:
    """The last of 64 drafts is a warp's alone. With few stages its loads end behind keys that it does not see."""
    lens, drafts = np.array([257, 340]), np.full(2, 64, dtype=np.int64)
    case = make_case(1, heads=(12, 2), head_dim=128, batch=([[], []], lens, drafts), trees=True, kv_dtype=kv_dtype)
    assert set(case.plan.items[case.plan.items[:, 6] == 8, 1]) == {1}
    check(case, emulate(emulation, case))


@pytest.mark.parametrize("rows", [64, 128])
def test_trees_in_products_of_a_warpgroup(emulation: ModuleType, rows: int) -> None:
    case = with_tile_rows(verify_case(rows // 8, (8, 1), head_dim=128, trees=True), rows)
    check(case, emulate(emulation, case))


@pytest.mark.parametrize("prologues", [0, 2])
@pytest.mark.parametrize("window", [-1, 70])
def test_items_without_a_prologue(emulation: ModuleType, window: int, prologues: int) -> None:
    """Slots and tokens are then read at the addresses that the record says."""
    fp8 = {"kv_dtype": torch.float8_e4m3fn}
    for case in (
        make_case(9, requests=8, window_left=window),
        make_case(9, heads=(11, 1), window_left=window),
        wide_case(window_left=window),
        wide_case(window_left=window, **fp8),
    ):
        expected = emulate(emulation, case, ctas=1)
        check(case, expected)
        assert same(emulate(emulation, case, ctas=1, prologues=prologues), expected)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("by", [1, 4, 8])
@pytest.mark.parametrize("longest", [385, 1154, 1156])
def test_what_lies_behind_the_last_token_is_not_read(
    emulation: ModuleType, longest: int, by: int, kv_dtype: torch.dtype
) -> None:
    """The plan was made for bounds. NaN is behind the end, and some of the last splits begin there."""
    batch = decode_batch([longest, longest + 3, longest + 40], new=4)
    case = make_case(1, heads=(8, 1), batch=batch, num_sms=132, kv_dtype=kv_dtype, grown=-by)
    check(case, emulate(emulation, case))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_splits_far_behind_the_end_have_no_keys(emulation: ModuleType, head_dim: int, kv_dtype: torch.dtype) -> None:
    """A tile of a warpgroup whose second half has no rows: both halves pass the same barriers."""
    batch = decode_batch([1153], new=6)
    case = make_case(1, heads=(8, 1), head_dim=head_dim, batch=batch, num_sms=132, kv_dtype=kv_dtype, grown=-200)
    assert (case.plan.items[:, 3] > 1153 - 200).any()
    check(case, emulate(emulation, case))
