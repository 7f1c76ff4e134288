"""Summaries of drawn cases by family and by head setting, cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.kernel.gpu_report import OURS, Row, best_of, geomean, number, ratio, time_of

FLOOR_US = 12.0  # added to the limit: the fastest cold step of one request takes so much longer than its bytes
SHARED = 1.3  # reuse above which a case counts as one that shares


def of_floor(row: Row) -> float | None:
    """(limit + 12 us) / ours."""
    ours = time_of(row, OURS)
    return (row["limits"]["limit_us"] + FLOOR_US) / ours if ours else None


def prediction_error(row: Row) -> float | None:
    """|predicted / measured - 1| of our own time."""
    ours, predicted = time_of(row, OURS), time_of(row, OURS, "predicted_us")
    return abs(predicted / ours - 1) if ours and predicted else None


def figures(rows: Iterable[Row]) -> dict[str, Any]:
    """The figure of some rows; None where nothing was measured."""
    rows = list(rows)
    ratios = [(value, row["key"]) for row in rows if (value := ratio(row))]
    errors = [error for row in rows if (error := prediction_error(row)) is not None]
    return {
        "cases": len(rows),
        "of_floor": geomean(of_floor(row) for row in rows),
        "over_best_baseline": geomean(value for value, _ in ratios),
        "compared": len(ratios),
        "behind_2_percent": sum(value < 1 / 1.02 for value, _ in ratios),
        "behind_10_percent": sum(value < 1 / 1.1 for value, _ in ratios),
        "worst": min(ratios, default=None),
        "prediction_error": statistics.median(errors) if errors else None,
    }


def drawn_summary(rows: list[Row]) -> dict[str, Any]:
    """Figures of 16-bit KV by family and heads, of those that share, and of fp8 KV."""
    wide = [row for row in rows if row["kv_dtype"] == "bf16"]
    return {
        "bf16": figures(wide),
        "bf16_shared": figures(row for row in wide if row["reuse"] > SHARED),
        "bf16_by_family": grouped(wide, family_of),
        "bf16_by_heads": grouped(wide, lambda row: str(row["heads"])),
        "bf16_by_head_dim": grouped(wide, lambda row: str(row["head_dim"])),
        "fp8": figures(row for row in rows if row["kv_dtype"] != "bf16"),
        "failed": [
            f"{row['key']}: {row['baselines'][OURS]['failed']}" for row in rows if "failed" in row["baselines"][OURS]
        ],
    }


def family_of(row: Row) -> str:
    return str(row["case"]).split("/")[0]


def grouped(rows: list[Row], key: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(key(row) for row in rows))
    return {name: figures(row for row in rows if key(row) == name) for name in names}


def drawn_lines(rows: list[Row]) -> list[str]:
    """The summary as a table."""
    summary = drawn_summary(rows)
    lines = [
        f"{'':<18} {'cases':>5} {'of floor':>8} {'x best':>7} {'behind 2 %':>10} {'10 %':>5} {'worst':>6}"
        f" {'pred. error':>11}"
    ]
    parts = {"all, bf16": summary["bf16"], "shared, bf16": summary["bf16_shared"], "all, fp8": summary["fp8"]}
    for name, part in (parts | summary["bf16_by_family"] | summary["bf16_by_heads"]).items():
        worst = part["worst"]
        lines.append(
            f"{name:<18} {part['cases']:>5} {number(part['of_floor'], '8.3f')} "
            f"{number(part['over_best_baseline'], '7.3f')} {part['behind_2_percent']:>10} "
            f"{part['behind_10_percent']:>5} {number(worst[0] if worst else None, '6.2f')} "
            f"{number(part['prediction_error'], '11.3f')}"
        )
    lines += [f"failed: {entry[:160]}" for entry in summary["failed"]]
    return lines


def row_line(row: Row) -> str:
    """One line of progress."""
    ours, best = time_of(row, OURS), best_of(row)
    return (
        f"{row['key']:<32} ours {number(ours, '9.1f')} predicted {number(time_of(row, OURS, 'predicted_us'), '9.1f')} "
        f"limit {row['limits']['limit_us']:9.1f} best {number(best[1] if best else None, '9.1f')} "
        f"{best[0] if best else ''}"
    )
