"""Tables of README.md and docs/ about kernels and routing, from the files in benchmarks/results."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernel.gpu_drawn_report import family_of
from benchmarks.kernel.gpu_report import MULTI_LEVEL, OURS, OURS_TOO, Row, fraction_of_limit, ratio
from sgl_prefix_attn.abtest.judge import Outcome, judge, outcomes
from sgl_prefix_attn.routing.measured import read_results
from sgl_prefix_attn.routing.policy_names import parse

RESULTS = Path(__file__).resolve().parent / "results"
Rows = Iterator[Sequence[str]]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def heads_first(title: str) -> tuple[float, str]:
    """Settings of heads by falling numbers of KV heads, other titles in their own order."""
    q_heads, _, kv_heads = title.partition("/")
    return (-int(kv_heads) - int(q_heads) / 1000, "") if kv_heads else (0, title)


def drawn(name: str, groups: Sequence[str], head: str) -> Rows:
    """Figures of drawn batches; `groups` are keys of the file's summary."""
    yield (head, "cases", "of floor", "x best", "behind 2 %", "behind 10 %", "worst", "prediction")
    summary = read(name)["summary"]
    for group in groups:
        parts = {"**all, bf16**": summary[group]} if group == "bf16" else summary[group]
        for title in sorted(parts, key=heads_first):
            part = parts[title]
            worst = part["worst"]
            yield (
                title,
                str(part["cases"]),
                f"{part['of_floor']:.2f}",
                f"{part['over_best_baseline']:.2f}",
                str(part["behind_2_percent"]),
                str(part["behind_10_percent"]),
                f"{worst[0]:.2f}",
                f"{part['prediction_error'] * 100:.0f} %",
            )


FAMILIES = {
    "few_shot": "few-shot prompts: 64 to 512 requests, 1 to 8 tasks",
    "mixture": "parts of several families in one batch",
    "thought": "trees of thought: 2 to 5 branches on 2 to 5 levels",
    "committed": "fixed trees: those of PAT and FastTree, random forests, no sharing",
    "questions": "a system prompt, documents, questions on each document",
    "agents": "agents: shared instructions, histories of their own",
    "rollouts": "RL rollouts: 2 to 128 samples of a prompt, sampled lengths",
    "long_documents": "2 to 64 requests on documents of 8K to 256K tokens",
    "ragged": "nothing shared, uneven lengths",
}


def attention_gains(name: str) -> dict[str, tuple[float, float]]:
    """By family: time of the fastest kernel with per-request reads, and of the fastest of all, over ours.

    Geometric means of 16-bit KV.
    """
    rows = [row for row in read(name)["rows"] if row["kv_dtype"] == "bf16"]
    parts = {family: [row for row in rows if family_of(row) == family] for family in FAMILIES}
    return {
        family: (
            statistics.geometric_mean(compared(part, single_level(part))), statistics.geometric_mean(compared(part))
        )
        for family, part in parts.items()
    }  # fmt: skip


def requests_of(name: str, family: str) -> str:
    """Fewest and most requests of a family's batches, 16-bit KV."""
    counts = [row["requests"] for row in read(name)["rows"] if row["kv_dtype"] == "bf16" and family_of(row) == family]
    return f"{min(counts)} to {max(counts)}"


def gains(name: str) -> Rows:
    """By family: how much is shared, and how ours compares with the baselines."""
    yield ("workload", "batches", "sharing", "x per-request", "x best", "faster", "behind 2 %", "worst")
    rows = [row for row in read(name)["rows"] if row["kv_dtype"] == "bf16"]
    for family, title in FAMILIES.items():
        part = [row for row in rows if family_of(row) == family]
        reuse = statistics.quantiles([row["reuse"] for row in part], n=4)
        means, (behind, worst) = means_of(part), losses_of(part)
        faster = str(sum(value > 1 for value in compared(part)))
        yield (title, str(len(part)), f"{reuse[0]:.1f} to {reuse[2]:.1f}", *means, faster, behind, worst)


def means_of(rows: Sequence[Row]) -> list[str]:
    """Geometric means of the times of the baselines over ours: of those with per-request reads, and of all."""
    both = (compared(rows, single_level(rows)), compared(rows))
    return [f"{statistics.geometric_mean(values):.2f}" for values in both]


def losses_of(rows: Sequence[Row]) -> tuple[str, str]:
    """How many batches are behind the best baseline by more than 2 %, and the worst one."""
    every = compared(rows)
    return str(sum(value < 1 / 1.02 for value in every)), f"{min(every):.2f}"


def single_level(rows: Sequence[Row]) -> set[str]:
    """The baselines that treat each request by itself, as servers run them."""
    return {name for row in rows for name in row["baselines"]} - {*MULTI_LEVEL, OURS, OURS_TOO}


def compared(rows: Sequence[Row], baselines: set[str] | None = None) -> list[float]:
    """Time of the fastest baseline / ours for each batch, cold L2."""
    return [value for row in rows if (value := ratio(row, baselines)) is not None]


LISTED = {
    "RL groups, 64 x 16, prompts 1K to 8K": ("rl/", ("32/8",)),
    "PAT's trees 1 to 20": ("pat/", ("32/32", "16/8", "32/8", "64/8")),
    "FastTree's trees": ("fasttree/", ("32/32", "32/8", "16/1")),
    "256 agents, one prompt of 8K": ("agents/", ("32/8",)),
    "conversations, 4 to 64 requests": ("chat/", ("32/8",)),
    "random forests": ("random/", ("32/8", "64/8")),
    "no sharing, 128 and 256 requests": (("none/b128", "none/b256"), ("32/8",)),
    "no sharing, 1 to 64 requests": (("none/b1_", "none/b8_", "none/b32", "none/b64"), ("32/8",)),
}


def listed(name: str) -> Rows:
    """The listed batches by kind and heads."""
    yield ("cases", "heads", "of the limit", "x per-request", "x best", "worst")
    every = read(name)["rows"]
    for title, (prefix, settings) in LISTED.items():
        for heads in settings:
            rows = [row for row in every if row["heads"] == heads and row["case"].startswith(prefix)]
            shares = [share for row in rows if (share := fraction_of_limit(row)) is not None]
            share = f"{statistics.geometric_mean(shares):.2f}"
            yield (title, heads, share, *means_of(rows), losses_of(rows)[1])


LOADS = ((1, 8, "below 8 requests"), (8, 64, "8 to 63"), (64, math.inf, "64 and more"))


def gains_by_load(name: str) -> Rows:
    """Attention, always packed, over fa3, by sharing and running requests, 16-bit KV."""
    yield ("sharing", *(title for _, _, title in LOADS))
    rows = [row for row in read(name)["rows"] if row["kv_dtype"] == "bf16"]
    for low, high, title in ((1, 1.01, "none"), (1.01, 2, "below 2"), (2, 4, "2 to 4"), (4, math.inf, "above 4")):
        cells = []
        for least, most, _ in LOADS:
            part = [row for row in rows if low <= row["reuse"] < high and least <= row["requests"] < most]
            ratios = compared(part, {"fa3"})
            cells.append(f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else "not sampled")
        yield (title, *cells)


def outcomes_of(name: str, policy: str, stock: str, kv_bytes: int = 2) -> list[Outcome]:
    """The decode steps of a results file with one KV type, under a policy over a stock backend."""
    found = outcomes(read_results(RESULTS / f"{name}.json"), parse(policy), "native", stock)
    return [each for each in found if each.case.shape.kv_bytes == kv_bytes]


# Seeds that had no part in the choice of thresholds: title, results files.
JUDGES = {
    "H200, two seeds": ("gpu_drawn", "gpu_drawn_857294969"),
    "H100, two seeds": ("gpu_drawn_h100", "gpu_drawn_h100_343745556"),
}
OTHERS = {"packed": "always packed", "batch>=64": "`batch>=64`", "conservative": "conservative rule"}


def policies() -> Rows:
    """The rule over the seeds that judge it, by GPU and stock backend, 16-bit KV; other policies beside it."""
    yield ("steps of", "stock", "steps", "packed", "mean regret", "worst", "gain", "oracle", *OTHERS.values())
    for (title, names), stock in itertools.product(JUDGES.items(), ("fa3", "flashinfer")):
        found = {
            policy: judge([each for name in names for each in outcomes_of(name, policy, stock)])
            for policy in ("auto", *OTHERS)
        }
        auto = found["auto"]
        regrets = [
            f"{100 * one.mean_regret:.{2 if one.mean_regret < 0.1 else 0}f} % ({one.behind})" for one in found.values()
        ]
        worst = f"{auto.worst[0]:.1%}".replace("%", " %")
        cells = (
            str(auto.steps),
            str(auto.packed),
            f"**{regrets[0]}**",
            worst,
            f"{auto.gain:.2f}",
            f"{auto.oracle:.2f}",
        )
        yield (title, f"`{stock}`", *cells, *regrets[1:])
