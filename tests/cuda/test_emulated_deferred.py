"""Rows that the warps combine: in parts, whatever their number of partials, and the same bits in every order.

The emulation fills partial results with NaN, checks that every counter is reset, and runs each layer twice.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from sgl_prefix_attn import _native
from tests.cuda.cases import Case, check, decode_batch, document, make_case, splits_of
from tests.cuda.emulated import emulate, same_bits

ONE_LEVEL = 4096  # most splits of a tile that are combined in one level
TWO_CTAS = ({"ctas": 2, "late_copies": False}, {"ctas": 2, "warps_first": True})


class Deferred(NamedTuple):
    """What a plan leaves to the warps. counts: partials of each query's list."""

    rows: int
    counts: list[int]
    parts: int
    active_warps: int


def deferred(case: Case, warp_ctas: int = 64) -> Deferred:
    shape = case.shape
    words = _native.serialize_plan(
        case.plan, case.planned_lens, growth=0, group=shape.group, kv_heads=shape.kv_heads, warp_ctas=warp_ctas
    ).words
    count, at, part_bits = words[_native.plan_header_words - 3 : _native.plan_header_words].tolist()
    stride = _native.plan_deferred_words
    counts = words[at : at + count * stride].reshape(count, stride)[:, 2].tolist()
    return Deferred(count * shape.q_heads, counts, 1 << part_bits, int(words[12]))


@pytest.mark.parametrize(
    ("tokens", "partials", "head_dim"),
    [
        *((tokens, partials, head_dim)
          for tokens, partials in ((1600, 13), (2400, 18), (3800, 28), (3900, 29), (4200, 31), (5000, 36), (9000, 64))
          for head_dim in (64, 128)),
        (16_500, 116, 128),
        (30_000, 210, 64),
    ],
)  # fmt: skip
def test_any_number_of_partials(emulation: ModuleType, tokens: int, partials: int, head_dim: int) -> None:
    """Slots in the record, behind it, in the second half of the first 64 of a list, and behind those."""
    case = document(2, tokens, head_dim=head_dim, with_sinks=partials % 2 == 0)
    assert splits_of(case) == partials
    assert deferred(case).rows == 16
    same_bits(emulation, case, fan_in=ONE_LEVEL, orders=TWO_CTAS)


@pytest.mark.parametrize("tokens", [1600, 3900, 9000, 16_500])
def test_quarters_of_rows_without_warp_tiles(emulation: ModuleType, tokens: int) -> None:
    """Warps claim parts from the start: eleven heads are too many rows for a warp, and no halves."""
    case = document(3, tokens, heads=(11, 1))
    assert (case.plan.items[:, 6] > 16).all()
    assert deferred(case).parts == 4
    same_bits(emulation, case, fan_in=ONE_LEVEL, orders=TWO_CTAS)


@pytest.mark.parametrize(
    ("heads", "requests", "tokens", "parts"),
    [((8, 1), 130, 300, 2), ((22, 2), 48, 1000, 1), ((9, 1), 100, 1000, 2)], ids=str,
)  # fmt: skip
def test_more_parts_than_warps(
    emulation: ModuleType, heads: tuple[int, int], requests: int, tokens: int, parts: int
) -> None:
    """In halves of rows, and in whole ones."""
    case = document(requests, tokens, heads=heads)
    found = deferred(case, warp_ctas=264)
    assert found.rows * found.parts >= 1024
    assert found.parts == parts
    same_bits(emulation, case, warp_ctas=264, orders=[{"ctas": 6, "warps_first": True}])


def test_more_warps_than_parts(emulation: ModuleType) -> None:
    case = document(1, 30_000, heads=(2, 1), window_left=20_000)
    orders = [{"ctas": ctas, **order} for ctas in (1, 13) for order in ({"late_copies": False}, {"warps_first": True})]
    same_bits(emulation, case, orders=orders)


def test_warps_that_take_no_tiles_combine_too(emulation: ModuleType) -> None:
    """Where tails of one length fill their waves better with fewer warps, all warps combine."""
    case = make_case(1, heads=(2, 1), batch=decode_batch([1300] * 20, 1000), num_sms=10)
    found = deferred(case, warp_ctas=4)
    assert found.active_warps == 5
    assert found.rows == 40
    for options in ({}, {"ctas": 1}, {"warps_first": True}, {"ctas": 6, "late_copies": False}):
        check(case, emulate(emulation, case, warp_ctas=4, **options))


@pytest.mark.parametrize("drafts", [8, 16])
@pytest.mark.parametrize("options", [{"trees": True}, {"window_left": 70}, {"dtype": torch.float16}], ids=str)
def test_verify_steps(emulation: ModuleType, drafts: int, options: dict[str, Any]) -> None:
    batch = decode_batch([1100, 1130], 1000, new=drafts)
    case = make_case(1, heads=(8, 1), batch=batch, num_sms=132, with_sinks=drafts == 16, **options)
    found = deferred(case)
    assert found.rows == 16 * drafts
    assert found.parts == 4
    same_bits(emulation, case, orders=TWO_CTAS)


@pytest.mark.parametrize("window_left", [-1, 70])
def test_sinks_count_once(emulation: ModuleType, window_left: int) -> None:
    """A window leaves most partials without weight; a sink outweighs all others."""
    for sink_offset in (-20.0, 20.0):
        case = document(2, 3900, with_sinks=True, sink_offset=sink_offset, window_left=window_left)
        check(case, emulate(emulation, case, fan_in=ONE_LEVEL))
