"""The combine of many KV splits, in two levels or deferred: right, and the same bits in every order of arrival.

The emulation fills partial results with NaN, and checks that every semaphore is reset.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.cuda.cases import Case, check, decode_batch, document, make_case, splits_of
from tests.cuda.emulated import emulate, same_bits, with_tile_rows

FAN_IN = 5  # most splits of a tile that are combined in one level; the kernels' own is 16
WARP_ROWS = 8


def single(tokens: int, *, heads: tuple[int, int], **options: Any) -> Case:
    """One request, split for many warps, whatever tile the planner chose."""
    case = make_case(tokens, heads=heads, batch=decode_batch([tokens]), num_sms=132, **options)
    assert splits_of(case) > FAN_IN
    return with_tile_rows(case, 16 if case.shape.group > WARP_ROWS else WARP_ROWS)


@pytest.mark.parametrize("warp_ctas", [0, 1, 64], ids=["ctas", "some deferred", "deferred"])
@pytest.mark.parametrize("heads", [(8, 1), (2, 2), (16, 1), (11, 1)], ids=str)
def test_ctas_combine_the_splits_of_a_document(emulation: ModuleType, heads: tuple[int, int], warp_ctas: int) -> None:
    case = document(4, 1000, heads=heads)
    assert splits_of(case) > FAN_IN
    same_bits(emulation, case, fan_in=FAN_IN, warp_ctas=warp_ctas)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (16, 1)], ids=str)
def test_warps_combine_the_splits_of_one_request(emulation: ModuleType, heads: tuple[int, int]) -> None:
    same_bits(emulation, single(1000, heads=heads), fan_in=FAN_IN)


def test_one_split_more_than_one_level_takes(emulation: ModuleType) -> None:
    """The last group of a tile has a single split, which stays in the query's own list."""
    case = single(1400, heads=(4, 1))
    splits = splits_of(case)
    flat, grouped = (emulate(emulation, case, fan_in=fan_in) for fan_in in (splits, splits - 1))
    check(case, flat)
    check(case, grouped)
    assert not torch.equal(flat[1], grouped[1])  # another order of summation: groups were at work


@pytest.mark.parametrize("fan_in", [1, 2, 3, 5])
def test_any_fan_in(emulation: ModuleType, fan_in: int) -> None:
    """Small groups, on several levels of a forest, also of tiles with queries of different lists."""
    case = make_case(fan_in, heads=(8, 2), requests=8, levels=3, tokens=900, num_sms=132)
    assert splits_of(case) > fan_in
    check(case, emulate(emulation, case, fan_in=fan_in))


@pytest.mark.parametrize("queries", [5, 128])
def test_queries_of_extend(emulation: ModuleType, queries: int) -> None:
    case = make_case(queries, heads=(1, 1), batch=decode_batch([1000], new=queries), num_sms=132)
    assert splits_of(case) > FAN_IN
    check(case, emulate(emulation, case, fan_in=FAN_IN))


@pytest.mark.parametrize(
    "options",
    [{"with_sinks": True}, {"window_left": 70}, {"dtype": torch.float16}, {"head_dim": 128}, {"head_dim": 256}],
    ids=str,
)
def test_variants(emulation: ModuleType, options: dict[str, Any]) -> None:
    """A window leaves whole groups behind; a sink counts once."""
    case = document(5, 1000, **options)
    assert splits_of(case) > FAN_IN
    for warp_ctas in (0, 64):
        check(case, emulate(emulation, case, fan_in=FAN_IN, warp_ctas=warp_ctas))
    if options.get("head_dim") != 256:
        case = single(1000, heads=(4, 1), **options)
        check(case, emulate(emulation, case, fan_in=FAN_IN))
