"""Runs a case on the emulated GPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.cuda.cases import Case, Result, check, same

GROWTH = 5
ORDERS: tuple[dict[str, Any], ...] = ({"ctas": 1}, {"ctas": 7, "late_copies": False}, {"warps_first": True})


def bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.view(torch.int16).numpy().view(np.uint16)


def emulate(
    emulation: ModuleType,
    case: Case,
    *,
    ctas: int = 3,
    late_copies: bool = True,
    warps_first: bool = False,
    fan_in: int = 16,
    warp_ctas: int = 64,
    layers: int = 1,
    prologues: int = 2048,
) -> Result:
    """Output and log-sum-exp of a case.

    Args:
        fan_in: most KV splits of a tile that are combined in one level.
        warp_ctas: CTAs of the warp kernel, by which the number of deferred combines is limited; 0: none is deferred.
        layers: launches with the same counters, which have to be reset by each, and by the last.
        prologues: items whose first slots and tokens are read beside their record.
    """
    out = torch.full_like(case.q, torch.nan)
    lse = torch.full(case.q.shape[:2], torch.nan)
    pool = case.pool
    of_arrays = {
        name: None if tensor is None else tensor.numpy()
        for name, tensor in (("sinks", case.variant["sinks"]), ("visible", case.visible))
    }
    emulation.attention(
        case.plan, bits(case.q), bits(pool.k_cache), bits(pool.v_cache), bits(out), lse.numpy(),
        pool.req_to_token.numpy(), pool.req_pool_indices.numpy(), case.planned_lens, pool.seq_lens.numpy(),
        growth=GROWTH, bfloat16=case.q.dtype == torch.bfloat16, ctas=ctas, late_copies=late_copies,
        warps_first=warps_first, fan_in=fan_in, warp_ctas=warp_ctas, layers=layers, prologues_of=prologues,
        **{**case.variant, **of_arrays},
    )  # fmt: skip
    return out, lse


def same_bits(emulation: ModuleType, case: Case, *, orders: Sequence[dict[str, Any]] = ORDERS, **options: Any) -> None:
    """The result is right in two layers of a step, and the same whoever arrives last or combines."""
    expected = emulate(emulation, case, layers=2, **options)
    check(case, expected)
    for order in orders:
        assert same(emulate(emulation, case, **options, **order), expected), order


def with_tile_rows(case: Case, rows: int) -> Case:
    """A case whose items of more than a warp tile, or with few rows all items, run in tiles of `rows` rows."""
    names = [name for name in dir(case.plan) if name.startswith(("num_", "query_", "combine_", "items", "mostly_"))]
    plan = SimpleNamespace(**{name: getattr(case.plan, name) for name in names})
    plan.items = plan.items.copy()
    tile_rows = plan.items[:, 6]
    tile_rows[(tile_rows > 8) if rows > 16 else slice(None)] = rows
    return replace(case, plan=plan)
