"""Rows that the warps combine: in parts, whatever their number of partials, and the same bits in every order.

The emulation fills partial results with NaN, checks that every counter is reset, and runs each layer twice.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from tests.cuda.cases import Case, check, make_case
from tests.cuda.emulated import emulate

ONE_LEVEL = 4096  # most splits of a tile that are combined in one level
WARP_CTAS = 64


class Deferred(NamedTuple):
    """What a plan leaves to the warps. counts: partials of each query's list."""

    rows: int
    counts: list[int]
    parts: int
    active_warps: int


def deferred(case: Case, warp_ctas: int = WARP_CTAS) -> Deferred:
    shape = case.shape
    words, _ = _native.serialize_plan(
        case.plan, case.planned_lens, growth=0, group=shape.group, kv_heads=shape.kv_heads, warp_ctas=warp_ctas
    )
    count, at, part_bits = words[_native.plan_header_words - 3 : _native.plan_header_words].tolist()
    stride = _native.plan_deferred_words
    counts = words[at : at + count * stride].reshape(count, stride)[:, 2].tolist()
    return Deferred(count * shape.q_heads, counts, 1 << part_bits, int(words[12]))


def document(requests: int, tokens: int, *, heads: tuple[int, int] = (8, 1), **options: Any) -> Case:
    """`requests` on one document, each with a short tail."""
    lens = tokens + 1 + 3 * np.arange(requests, dtype=np.int64)
    batch = ([[(0, 0, tokens)]] * requests, lens, np.ones(requests, dtype=np.int64))
    return make_case(tokens, heads=heads, batch=batch, num_sms=132, **options)


def same_bits(emulation: ModuleType, case: Case, ctas: tuple[int, ...] = (1, 7), **options: Any) -> None:
    """The result is right and the same, whoever combines."""
    out, lse = emulate(emulation, case, warp_ctas=WARP_CTAS, **options)
    check(case, (out, lse))
    for number in ctas:
        for order in ({"late_copies": False}, {"warps_first": True}):
            again, again_lse = emulate(emulation, case, warp_ctas=WARP_CTAS, ctas=number, **options, **order)
            assert torch.equal(out.view(torch.int16), again.view(torch.int16)), (number, order)
            assert torch.equal(lse, again_lse), (number, order)


def splits_of(case: Case) -> int:
    """Most KV splits of an item's queries."""
    return int(np.unique(case.plan.items[:, 0], return_counts=True)[1].max())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("tokens", "partials"),
    [(1600, 13), (2400, 18), (3800, 28), (3900, 29), (4200, 31), (5000, 36), (9000, 64), (16_500, 116), (30_000, 210)],
)
def test_any_number_of_partials(emulation: ModuleType, tokens: int, partials: int, head_dim: int) -> None:
    """Slots in the record, behind it, in the second half of the first 64 of a list, and behind those."""
    case = document(2, tokens, head_dim=head_dim, with_sinks=partials % 2 == 0)
    assert splits_of(case) == partials
    assert deferred(case).rows == 16
    same_bits(emulation, case, fan_in=ONE_LEVEL, ctas=(2,))


@pytest.mark.parametrize(("heads", "requests", "parts"), [((8, 1), 130, 2), ((22, 2), 48, 1)], ids=str)
def test_more_parts_than_warps(emulation: ModuleType, heads: tuple[int, int], requests: int, parts: int) -> None:
    """In halves of rows, and in whole ones."""
    case = document(requests, 1000, heads=heads)
    found = deferred(case, warp_ctas=264)
    assert found.rows >= 1024
    assert found.parts == parts
    out, lse = emulate(emulation, case, warp_ctas=264)
    check(case, (out, lse))
    again, again_lse = emulate(emulation, case, warp_ctas=264, ctas=6, warps_first=True)
    assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    assert torch.equal(lse, again_lse)


def test_more_warps_than_parts(emulation: ModuleType) -> None:
    case = document(1, 30_000, heads=(2, 1), window_left=20_000)
    same_bits(emulation, case, ctas=(1, 13))


def test_warps_that_take_no_tiles_combine_too(emulation: ModuleType) -> None:
    """Where tails of one length fill their waves better with fewer warps, all warps combine."""
    lens = np.full(20, 1300)
    batch = ([[(0, 0, 1000)]] * 20, lens, np.ones(20, dtype=np.int64))
    case = make_case(1, heads=(2, 1), batch=batch, num_sms=10)
    found = deferred(case, warp_ctas=4)
    assert found.active_warps == 5
    assert found.rows == 40
    for options in ({}, {"ctas": 1}, {"warps_first": True}, {"ctas": 6, "late_copies": False}):
        check(case, emulate(emulation, case, warp_ctas=4, **options))


@pytest.mark.parametrize("drafts", [8, 16])
@pytest.mark.parametrize("options", [{"trees": True}, {"window_left": 70}, {"dtype": torch.float16}], ids=str)
def test_verify_steps(emulation: ModuleType, drafts: int, options: dict[str, Any]) -> None:
    batch = ([[(0, 0, 1000)]] * 2, np.array([1100, 1130]), np.full(2, drafts))
    case = make_case(1, heads=(8, 1), batch=batch, num_sms=132, with_sinks=drafts == 16, **options)
    found = deferred(case)
    assert found.rows == 16 * drafts
    assert found.parts == 4
    same_bits(emulation, case, ctas=(2,))


@pytest.mark.parametrize("window_left", [-1, 70])
def test_sinks_count_once(emulation: ModuleType, window_left: int) -> None:
    """A window leaves most partials without weight; a sink outweighs all others."""
    for sink_offset in (-20.0, 20.0):
        case = document(2, 3900, with_sinks=True, sink_offset=sink_offset, window_left=window_left)
        check(case, emulate(emulation, case, fan_in=ONE_LEVEL, warp_ctas=WARP_CTAS))
