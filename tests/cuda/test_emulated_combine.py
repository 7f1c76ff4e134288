"""The combine of many KV splits in two levels: right, and the same bits in every order of arrival.

The emulation fills partial results with NaN, checks that every semaphore is reset, and runs each layer twice.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.cases import Case, check, make_case
from tests.cuda.emulated import emulate

FAN_IN = 16
WARP_ROWS = 8


def splits_of(case: Case) -> int:
    """Most KV splits of an item's queries."""
    return int(np.unique(case.plan.items[:, 0], return_counts=True)[1].max())


def document(requests: int, tokens: int, *, heads: tuple[int, int], multiprocessors: int, **options: Any) -> Case:
    """`requests` on one document, which the planner cuts for `multiprocessors`; each has a short tail."""
    lens = tokens + 1 + 3 * np.arange(requests, dtype=np.int64)
    batch = ([[(0, 0, tokens)]] * requests, lens, np.ones(requests, dtype=np.int64))
    case = make_case(tokens, heads=heads, batch=batch, multiprocessors=multiprocessors, **options)
    assert splits_of(case) > FAN_IN
    assert (case.plan.items[:, 6] > WARP_ROWS).any()
    return case


def single(tokens: int, *, heads: tuple[int, int], multiprocessors: int, **options: Any) -> Case:
    """One request, whose splits are tiles of warps unless its group is too large."""
    batch = ([[]], np.array([tokens], dtype=np.int64), np.ones(1, dtype=np.int64))
    case = make_case(tokens, heads=heads, batch=batch, multiprocessors=multiprocessors, **options)
    assert splits_of(case) > FAN_IN
    return case


def same_bits(emulation: ModuleType, case: Case) -> None:
    """The result is right, whoever arrives last."""
    out, lse = emulate(emulation, case)
    check(case, (out, lse))
    for options in ({"blocks": 1}, {"blocks": 7}, {"warps_first": True}, {"late_copies": False, "blocks": 4}):
        again, again_lse = emulate(emulation, case, **options)
        assert torch.equal(out.view(torch.int16), again.view(torch.int16)), options
        assert torch.equal(lse, again_lse), options


@pytest.mark.parametrize("heads", [(8, 1), (2, 2), (16, 1), (11, 1)], ids=str)
def test_ctas_combine_the_splits_of_a_document(emulation: ModuleType, heads: tuple[int, int]) -> None:
    same_bits(emulation, document(6, 1400, heads=heads, multiprocessors=24))


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (16, 1)], ids=str)
def test_warps_combine_the_splits_of_one_request(emulation: ModuleType, heads: tuple[int, int]) -> None:
    case = single(2600, heads=heads, multiprocessors=132)
    assert (case.plan.items[:, 6] <= (16 if heads == (16, 1) else WARP_ROWS)).all()
    same_bits(emulation, case)


def test_one_split_more_than_one_level_takes(emulation: ModuleType) -> None:
    """The last group of a tile has a single split, which stays in the query's own list."""
    case = single(2600, heads=(4, 1), multiprocessors=132)
    splits = splits_of(case)
    flat, flat_lse = emulate(emulation, case, fan_in=splits)
    grouped, grouped_lse = emulate(emulation, case, fan_in=splits - 1)
    check(case, (flat, flat_lse))
    check(case, (grouped, grouped_lse))
    assert not torch.equal(flat_lse, grouped_lse)  # another order of summation: groups were at work


@pytest.mark.parametrize("fan_in", [1, 2, 3, 5])
def test_any_fan_in(emulation: ModuleType, fan_in: int) -> None:
    """Small groups, on several levels of a forest, also of tiles with queries of different lists."""
    case = make_case(fan_in, heads=(8, 2), requests=8, levels=3, tokens=400, multiprocessors=12)
    assert splits_of(case) > fan_in
    check(case, emulate(emulation, case, fan_in=fan_in))


@pytest.mark.parametrize("queries", [5, 128])
def test_queries_of_extend(emulation: ModuleType, queries: int) -> None:
    batch = ([[]], np.array([1600], dtype=np.int64), np.full(1, queries, dtype=np.int64))
    case = make_case(queries, heads=(1, 1), batch=batch, multiprocessors=40)
    assert splits_of(case) > FAN_IN
    check(case, emulate(emulation, case))


@pytest.mark.parametrize(
    "options",
    [{"with_sinks": True}, {"window_left": 70}, {"dtype": torch.float16}, {"head_dim": 128}, {"head_dim": 256}],
    ids=str,
)
def test_variants(emulation: ModuleType, options: dict[str, Any]) -> None:
    """A window leaves whole groups behind; a sink counts once."""
    case = document(5, 1200, heads=(8, 1), multiprocessors=24, **options)
    check(case, emulate(emulation, case))
    if options.get("head_dim") != 256:
        case = single(2000, heads=(4, 1), multiprocessors=100, **options)
        check(case, emulate(emulation, case))
