"""What two backends did with the same requests, side by side: tokens, latencies, KV reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sgl_prefix_attn.demo.client import Answer, Sample

_COUNTERS = ("kv_tokens_read", "kv_tokens_per_request", "kv_tokens_unique")


@dataclasses.dataclass(frozen=True)
class KVReads:
    """KV tokens of the packed steps, per layer and KV head.

    read: with packing. per_request: if every request read its own. unique: if each were read once a step.
    """

    read: int
    per_request: int
    unique: int

    @property
    def saved(self) -> float:
        """Share of the per-request reads that packing spared, 0 to 1; 0 when no step ran packed."""
        return 1 - self.read / self.per_request if self.per_request else 0.0

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> KVReads:
        """Reads from one packing state of a server to a later one."""
        return cls(*(after["counters"][name] - before["counters"][name] for name in _COUNTERS))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One workload served by one backend. kv: None where the backend does not count its reads."""

    backend: str
    answers: tuple[Answer, ...]
    seconds: float
    kv: KVReads | None
    fallbacks: Mapping[str, int]

    @property
    def samples(self) -> list[Sample]:
        return [sample for answer in self.answers for sample in answer.samples]

    def first_token_ms(self, percentile: float) -> float:
        return _percentile_ms([sample.time_to_first_token for sample in self.samples], percentile)

    def output_token_ms(self, percentile: float) -> float:
        times = [sample.time_per_output_token for sample in self.samples]
        return _percentile_ms([time for time in times if time is not None], percentile)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One workload on the stock backend and on prefixpack."""

    workload: str
    stock: Measurement
    packed: Measurement

    def tokens(self) -> tuple[int, int]:
        """Token positions at which both generated the same, and all positions."""
        pairs = list(zip(self.stock.samples, self.packed.samples, strict=True))
        same = sum(sum(a == b for a, b in zip(one.tokens, two.tokens, strict=False)) for one, two in pairs)
        return same, sum(max(len(one.tokens), len(two.tokens)) for one, two in pairs)

    @property
    def identical(self) -> bool:
        same, total = self.tokens()
        return same == total

    def differences(self) -> list[str]:
        """A line for every sample that differs: request, sample, and the position of the first different token."""
        lines = []
        for stock, packed in zip(self.stock.answers, self.packed.answers, strict=True):
            for number, (one, two) in enumerate(zip(stock.samples, packed.samples, strict=True)):
                if one.tokens != two.tokens:
                    pairs = zip(one.tokens, two.tokens, strict=False)
                    shorter = min(len(one.tokens), len(two.tokens))
                    position = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
                    lines.append(f"{stock.request.name}, sample {number}: from generated token {position} on")
        return lines

    def as_json(self) -> dict[str, Any]:
        same, total = self.tokens()
        return {
            "workload": self.workload,
            "requests": len(self.stock.answers),
            "prompt_tokens": sum(len(answer.request.prompt) for answer in self.stock.answers),
            "tokens_identical": same,
            "tokens": total,
            "differences": self.differences(),
            "runs": [_run_json(run) for run in (self.stock, self.packed)],
        }


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as text, one line a workload and backend."""
    header = ("workload", "backend", "tokens identical", "TTFT ms p50/p99", "TPOT ms p50/p99", "KV reads saved")
    rows: list[tuple[str, ...]] = [header]
    for comparison in comparisons:
        for run in (comparison.stock, comparison.packed):
            is_stock = run is comparison.stock
            same, total = comparison.tokens()
            rows.append(
                (
                    comparison.workload if is_stock else "",
                    run.backend,
                    "" if is_stock else f"{same}/{total}",
                    f"{run.first_token_ms(50):.0f}/{run.first_token_ms(99):.0f}",
                    f"{run.output_token_ms(50):.1f}/{run.output_token_ms(99):.1f}",
                    "" if run.kv is None else f"{run.kv.saved:.1%} ({run.kv.read:,} of {run.kv.per_request:,})",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _run_json(run: Measurement) -> dict[str, Any]:
    return {
        "backend": run.backend,
        "seconds": run.seconds,
        "ttft_ms": {"p50": run.first_token_ms(50), "p99": run.first_token_ms(99)},
        "tpot_ms": {"p50": run.output_token_ms(50), "p99": run.output_token_ms(99)},
        "kv_tokens": None if run.kv is None else {**dataclasses.asdict(run.kv), "saved": run.kv.saved},
        "fallbacks": dict(run.fallbacks),
        "retractions": sum(sample.retractions for sample in run.samples),
    }


def _percentile_ms(seconds: Sequence[float], percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1000 if seconds else float("nan")
