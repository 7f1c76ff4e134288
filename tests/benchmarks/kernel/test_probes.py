"""What the probes of redesigns decide, by rows as they write them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernel.probes.__main__ import verdict


def prefetch_rows(gained_us: float) -> list[dict[str, Any]]:
    cases = {"CTAs 10 us": 0.0, "CTAs 20 us": gained_us, "CTAs 80 us": 9.0}
    tails, best = "256 tails of 256", "16 MB of all"
    return [
        {"case": f"{tails}, {phase}, {prefetch}", "us": 90.0, "gained_us": gain * (prefetch == best)}
        for phase, gain in cases.items()
        for prefetch in ("no prefetch", best, "16 MB of the first")
    ]


def tile_rows(half_us: float) -> list[dict[str, Any]]:
    cases = {"half an SM, 4 stages": 1.4, "half an SM, 5 stages": half_us, "whole SM, 8 stages": 1.0}
    return [{"case": case, "us_of_64_keys": us} for case, us in cases.items()]


def tree_rows(us: float, prefetched_us: float) -> list[dict[str, Any]]:
    tree_12 = {"us": us, "prefetched_us": prefetched_us}
    return [
        {"case": "tree 2, CTAs of 8 requests", "us": 20.0, "prefetched_us": 25.0},
        {"case": "tree 12, CTAs of 16 requests", "us": 99.0, "prefetched_us": 99.0},
        {"case": "tree 12, CTAs of 32 requests", **tree_12},
    ]


@pytest.mark.parametrize(
    ("probe", "rows", "figure", "worth"),
    [
        ("tail_prefetch", prefetch_rows(3.5), 3.5, True),
        ("tail_prefetch", prefetch_rows(2.5), 2.5, False),
        ("lone_wide_tile", tile_rows(1.2), 1.2, True),
        ("lone_wide_tile", tile_rows(1.3), 1.3, False),
        ("cluster_splits", [{"case": "1 x 2048 tokens, best of each", "gained_us": 1.9}], 1.9, False),
        ("query_chains", tree_rows(70, 60), 60 / 62, True),
        ("query_chains", tree_rows(70, 64), 64 / 62, False),
    ],
)
def test_a_redesign_is_stopped_by_its_own_figure(
    probe: str, rows: list[dict[str, Any]], figure: float, worth: bool
) -> None:
    assert verdict(probe, rows) == (pytest.approx(figure), worth)
