"""The results of `benchmarks.serving` as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.measure import Agreement, Run
from benchmarks.serving.ranks import Ranks
from sgl_prefix_attn.abtest.judge import table_lines


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure of several runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def described(self, form: str) -> str:
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


@dataclasses.dataclass(frozen=True)
class Medians:
    """Several runs of a workload on one server, each with its own medians; None where no run has one."""

    workload: str
    backend: str
    runs: int
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    output_tokens_per_second: Spread

    @classmethod
    def of(cls, workload: str, backend: str, runs: Sequence[Run]) -> Medians:
        figures = [run.as_json() for run in runs]

        def spread(name: str) -> Spread | None:
            values = [each[name]["p50"] for each in figures if each[name] is not None]
            return Spread.of(values) if values else None

        speed = Spread.of([each["output_tokens_per_second"] for each in figures])
        return cls(workload, backend, len(runs), spread("ttft_ms"), spread("tpot_ms"), speed)

    def __str__(self) -> str:
        ttft = "-" if self.ttft_ms is None else self.ttft_ms.described(".0f")
        tpot = "-" if self.tpot_ms is None else self.tpot_ms.described(".2f")
        speed = self.output_tokens_per_second.described(".0f")
        return (
            f"{self.workload}, {self.backend}, median of {self.runs} runs (least to most): "
            f"TTFT ms {ttft}, TPOT ms {tpot}, output tok/s {speed}"
        )


class Report:
    """What was measured so far; written whole after every run, so that a killed benchmark keeps what it has."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.runs: list[Run] = []
        self.backends: list[str] = []  # of each run
        self.extra: list[dict[str, Any]] = []
        self.ranks: dict[int, Ranks] = {}  # by number of the run
        self.failures: dict[str, str] = {}

    def add(self, run: Run, backend: str, extra: dict[str, Any]) -> None:
        self.runs.append(run)
        self.backends.append(backend)
        self.extra.append(extra)
        self.write()

    def add_ranks(self, ranks: Ranks | None) -> None:
        """What the ranks of the last run's server have counted, if it has several."""
        if ranks is not None:
            self.ranks[len(self.runs) - 1] = ranks
            self.extra[-1]["ranks"] = ranks.as_json()
            self.write()

    def fail(self, backend: str, why: str) -> None:
        self.failures[backend] = why
        self.write()

    def as_json(self) -> dict[str, Any]:
        return {
            **self.header,
            "runs": [{**run.as_json(), **extra} for run, extra in zip(self.runs, self.extra, strict=True)],
            "agreement": [
                {
                    "workload": one.workload,
                    "of": one.label,
                    "with": other.label,
                    **Agreement.between(one, other).as_json(),
                }
                for one, other in self._pairs()
            ],
            "medians": [dataclasses.asdict(medians) for medians in self.medians()],
            "failures": self.failures,
        }

    def _pairs(self) -> Iterator[tuple[Run, Run]]:
        """Runs to be compared: of each workload the first runs of all backends, and each with its own repetitions."""
        runs = list(zip(self.runs, self.backends, strict=True))
        for number, (one, backend) in enumerate(runs):
            before = runs[:number]
            if any(run.workload == one.workload and name == backend for run, name in before):
                continue
            met = set()
            for other, name in runs[number + 1 :]:
                if other.workload == one.workload and (name == backend or name not in met):
                    met.add(name)
                    yield one, other

    def medians(self) -> list[Medians]:
        """Medians of the backends that ran a workload several times."""
        groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run, backend in zip(self.runs, self.backends, strict=True):
            groups[run.workload, backend].append(run)
        return [Medians.of(*key, runs) for key, runs in groups.items() if len(runs) > 1]

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)

    def table(self) -> str:
        """One line a run, workload by workload; agreement is with the first run of a workload."""
        header = ("workload", "run", "TP", "TTFT ms p50/p99", "TPOT ms p50/p99", "steady TPOT", "output tok/s",
                  "all tok/s", "KV saved", "host us", "routed packed", "same as first", "prefix")  # fmt: skip
        names = dict.fromkeys(run.workload for run in self.runs)
        rows = [header, *(self._row(run) for name in names for run in self.runs if run.workload == name)]
        lines = table_lines(rows)
        lines.extend(str(medians) for medians in self.medians())
        lines.extend(
            f"{run.workload}, {run.label}: {run.short_samples} samples ended early"
            for run in self.runs
            if run.short_samples
        )
        lines.extend(
            f"{run.workload}, {run.label}: {described(self.ranks[number])}"
            for number, run in enumerate(self.runs)
            if number in self.ranks
        )
        lines.extend(f"failed: {backend}: {why.splitlines()[0]}" for backend, why in self.failures.items())
        return "\n".join(lines)

    def _row(self, run: Run) -> tuple[str, ...]:
        figures = run.as_json()
        first = next(other for other in self.runs if other.workload == run.workload)
        agreement = Agreement.between(first, run)
        same, share = f"{agreement.identical}/{agreement.samples}", agreement.as_json()["common_prefix_share"]
        return (
            run.workload if run is first else "",
            run.label,
            str(self.header.get("tp", 1)),
            pair(figures["ttft_ms"], ".0f"),
            pair(figures["tpot_ms"], ".2f"),
            pair(figures["steady_tpot_ms"], ".2f"),
            f"{figures['output_tokens_per_second']:.0f}",
            f"{figures['all_tokens_per_second']:.0f}",
            "" if run.kv is None else f"{run.kv.saved:.1%}",
            "" if run.host_us_per_step is None else f"{run.host_us_per_step:.0f}",
            routed_packed(run),
            "" if run is first else same,
            "" if run is first else f"{share:.3f}",
        )


def described(ranks: Ranks) -> str:
    """Whether ranks counted the same, and if not what differs."""
    if ranks.alike:
        return f"{ranks.expected} ranks counted the same: {ranks.totals[0].get('kv_tokens_read', 0):.0f} KV tokens read"
    if len(ranks.totals) < ranks.expected:
        return f"{len(ranks.totals)} of {ranks.expected} ranks counted anything"
    return f"RANKS COUNTED DIFFERENTLY: {', '.join(ranks.differing)}"


def routed_packed(run: Run) -> str:
    """Decode steps that ran packed, of those that could have gone either way; empty where none could."""
    routed = run.counters.get("routed_steps", {})
    total = sum(routed.values())
    return f"{routed.get('packed', 0)}/{total}" if total else ""


def pair(percentiles: dict[str, float] | None, form: str) -> str:
    return "-" if percentiles is None else f"{percentiles['p50']:{form}}/{percentiles['p99']:{form}}"
