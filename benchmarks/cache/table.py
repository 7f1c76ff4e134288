"""Results of the replays as a JSON file that grows cell by cell, and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cache.trace import BLOCK_TOKENS

LRU, OPTIMUM = "limit K=0", "limit K=all"


class Results:
    """Cells by row (what was replayed) and pool (blocks). What a file has already is not measured again."""

    def __init__(self, path: Path, trace: Mapping[str, Any]) -> None:
        self.path = path
        self.trace = dict(trace)
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["trace"] != self.trace:
                raise ValueError(f"{path} has results of another trace: {stored['trace']}, not {self.trace}")
            self.rows = stored["rows"]

    def has(self, row: str, pool: int) -> bool:
        return str(pool) in self.rows.get(row, {})

    def put(self, row: str, pool: int, cell: Mapping[str, Any]) -> None:
        self.rows.setdefault(row, {})[str(pool)] = dict(cell)
        text = json.dumps({"trace": self.trace, "block_tokens": BLOCK_TOKENS, "rows": self.rows}, indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")

    def saved(self, row: str, pool: int) -> float | None:
        cell = self.rows.get(row, {}).get(str(pool))
        return None if cell is None else float(cell["saved"])

    def pools(self) -> list[int]:
        return sorted({int(pool) for row in self.rows.values() for pool in row})

    def table(self) -> str:
        """Share of prompt blocks saved, in percent; in brackets the part of the gap from LRU to the optimum."""
        pools = self.pools()
        width = max(len(row) for row in self.rows)
        head = "".join(f"{pool * BLOCK_TOKENS / 1e6:>13.1f} M" for pool in pools)
        lines = [f"{'pool, tokens'.ljust(width)}{head}"]
        for row in self.rows:
            lines.append(row.ljust(width) + "".join(self._cell(row, pool).rjust(15) for pool in pools))
        return "\n".join(lines)

    def _cell(self, row: str, pool: int) -> str:
        saved, lru, optimum = self.saved(row, pool), self.saved(LRU, pool), self.saved(OPTIMUM, pool)
        if saved is None:
            return "-"
        if lru is None or optimum is None or optimum <= lru:
            return f"{100 * saved:.2f}"
        return f"{100 * saved:.2f} ({100 * (saved - lru) / (optimum - lru):.0f}%)"
