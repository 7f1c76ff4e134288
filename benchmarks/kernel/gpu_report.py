"""Rows of `gpu_attention`: the file they are kept in, what follows from them, and the tables that are printed."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

OURS = "prefixpack"
OURS_TOO = "prefixpack_triton"  # measured beside it, no baseline
MULTI_LEVEL = ("flashinfer_cascade", "fa3_two_pass")
REQUEST_WISE_DECODE = ("flashinfer_decode_cc", "flashinfer_decode_tc")
Row = dict[str, Any]


class Results:
    """The result file, rewritten whole after every row, so that a killed run keeps what it has."""

    def __init__(
        self,
        path: Path | None,
        header: dict[str, Any],
        *,
        resume: bool = False,
        summarise: Callable[[list[Row]], dict[str, Any]] | None = None,
    ) -> None:
        self.path, self.header = path, header
        self.summarise = summary if summarise is None else summarise
        self.rows: list[Row] = []
        if resume and path is not None and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if kv_dtype(before) != kv_dtype(header):
                raise ValueError(f"{path} holds times over KV in {kv_dtype(before)}, not {kv_dtype(header)}")
            self.rows = before["rows"]

    def done(self, key: str) -> bool:
        return any(row["key"] == key for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.header, "summary": self.summarise(self.rows), "rows": self.rows}
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)


def kv_dtype(header: dict[str, Any]) -> str:
    """Type of KV, as `gpu_attention --kv-dtype` names it."""
    return str(header.get("kv_dtype", "bf16"))  # the first files had no other


def time_of(row: Row, baseline: str, timing: str = "cold_us") -> float | None:
    """Microseconds of a baseline in a row; None where it was not measured."""
    return row["baselines"].get(baseline, {}).get(timing)


def best_of(row: Row, baselines: Iterable[str] | None = None) -> tuple[str, float] | None:
    """Name and time of the fastest baseline, of `baselines` or of all."""
    measured = [
        (name, result["cold_us"])
        for name, result in row["baselines"].items()
        if name not in (OURS, OURS_TOO) and "cold_us" in result and (baselines is None or name in baselines)
    ]
    return min(measured, key=lambda entry: entry[1], default=None)


def fraction_of_limit(row: Row) -> float | None:
    ours = time_of(row, OURS)
    return row["limits"]["limit_us"] / ours if ours else None


def ratio(row: Row, baselines: Iterable[str] | None = None) -> float | None:
    """Time of the fastest of the baselines `baselines` over ours: above 1, ours is faster."""
    best, ours = best_of(row, baselines), time_of(row, OURS)
    return best[1] / ours if best and ours else None


def geomean(values: Iterable[float | None]) -> float | None:
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else None


def pat_number(row: Row) -> int:
    return int(row["case"].split("/")[1]) if row["case"].startswith("pat/") else 0


def summary(rows: list[Row]) -> dict[str, Any]:
    """Figures over rows, cold L2, by head setting where it says so; None where nothing was measured."""
    shared: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if 1 <= pat_number(row) <= 18:
            shared[row["heads"]].append(row)
    deep = [row for row in rows if 9 <= pat_number(row) <= 18]
    timed = [(ratio(row), row["key"]) for row in rows if ratio(row)]
    saving = [(ratio(row), row["key"]) for row in rows if ratio(row) and row["reuse"] > 1.3]
    return {
        "fraction_of_limit_pat_1_18": {heads: geomean(map(fraction_of_limit, of)) for heads, of in shared.items()},
        "over_best_baseline_pat_1_18": {heads: geomean(map(ratio, of)) for heads, of in shared.items()},
        "over_best_multi_level_pat_9_18": geomean(ratio(row, MULTI_LEVEL) for row in deep),
        "over_flashinfer_decode_pat_9_18": geomean(ratio(row, REQUEST_WISE_DECODE) for row in deep),
        "worst_over_best_baseline": min(timed, default=None),
        "worst_over_best_baseline_where_sharing_saves_1.3x": min(saving, default=None),
        "bandwidth_fraction_no_sharing": {
            row["key"]: row["limits"]["unique_us"] / row["baselines"][OURS]["cold_us"]
            for row in rows
            if row["reuse"] == 1 and time_of(row, OURS)
        },
        "wrong_or_failed": [
            f"{row['key']}: {baseline}: {result['failed']}"
            for row in rows
            for baseline, result in row["baselines"].items()
            if "failed" in result
        ],
    }


def number(value: float | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)


def summary_lines(rows: list[Row]) -> list[str]:
    figures = summary(rows)
    lines = []
    for name in ("fraction_of_limit_pat_1_18", "over_best_baseline_pat_1_18"):
        values = ", ".join(f"{heads} {value:.3f}" for heads, value in figures[name].items() if value)
        lines.append(f"{name}: {values or 'not measured'}")
    for name in ("over_best_multi_level_pat_9_18", "over_flashinfer_decode_pat_9_18"):
        lines.append(f"{name}: {'not measured' if figures[name] is None else round(figures[name], 3)}")
    for name in ("worst_over_best_baseline", "worst_over_best_baseline_where_sharing_saves_1.3x"):
        worst = figures[name]
        lines.append(f"{name}: {'not measured' if worst is None else f'{worst[0]:.3f} ({worst[1]})'}")
    failed = figures["wrong_or_failed"]
    lines.append(f"wrong or failed: {len(failed)}")
    lines.extend(f"  {entry[:160]}" for entry in failed[:12])
    return lines
