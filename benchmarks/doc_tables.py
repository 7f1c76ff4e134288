"""Writes the tables of README.md and docs/ from the files in benchmarks/results.

    python -m benchmarks.doc_tables

A table stands between `<!-- table: NAME -->` and `<!-- end table -->`. To show a new measurement, replace its file in
benchmarks/results, or change the file's name in `TABLES`, and run this.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.doc_kernel_tables import (
    Rows,
    attention_gains,
    drawn,
    gains,
    gains_by_load,
    listed,
    policies,
    read,
    requests_of,
)
from benchmarks.kernel.gpu_report import OURS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/**/*.md")
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def rollout_runs(prompt_tokens: int) -> dict[str, dict[str, Any]]:
    """Runs of the rollout with prompts of this length, by backend."""
    return {
        run["backend"]: run for run in read(ROLLOUTS[prompt_tokens])["runs"] if run["prompt_tokens"] == prompt_tokens
    }


def rollouts() -> Rows:
    """Steady windows of rollouts: ours beside the stock backends, by length of the prompts."""
    yield ("prompts", *(f"`{backend}`" for backend in BACKENDS), "decode step, 256 running", "steps packed")
    for prompt_tokens in ROLLOUTS:
        runs = rollout_runs(prompt_tokens)
        times = [f"{runs[backend]['steps']['decode_step_ms']['256-287']:.0f}" for backend in BACKENDS]
        packed, routed = runs[OURS]["routed_steps"]["packed"], sum(runs[OURS]["routed_steps"].values())
        speeds = [f"{runs[backend]['tokens_per_second']:,.0f}" for backend in BACKENDS]
        speeds[0] = f"{speeds[0]} ({rollout_gain(prompt_tokens):.2f}x)"
        steps = f"{', '.join(times)} ms"
        yield (f"{prompt_tokens // 1024}K", *speeds, steps, f"{packed:,} of {routed:,}")


def rollout_gain(prompt_tokens: int) -> float:
    """Output tokens per second over those of the faster stock backend."""
    speeds = {backend: run["tokens_per_second"] for backend, run in rollout_runs(prompt_tokens).items()}
    return float(speeds[OURS] / max(speed for backend, speed in speeds.items() if backend != OURS))


def whole_gains() -> tuple[list[float], list[float]]:
    """Gains over fa3 of whole runs and of their steady windows, one a seed."""
    runs = {(run["backend"], run["seed"]): run for run in read("serving_rollout_whole")["runs"]}
    seeds = sorted({seed for _, seed in runs})
    keys = ("whole_tokens_per_second", "tokens_per_second")
    whole, steady = ([runs[OURS, seed][key] / runs["fa3", seed][key] for seed in seeds] for key in keys)
    return whole, steady


STOCK = ("fa3", "flashinfer")
BACKENDS = (OURS, *STOCK)
# Length of prompts: result file.
ROLLOUTS = {1024: "serving_rollout_1k_4k", 4096: "serving_rollout_1k_4k", 16384: "serving_rollout_16k"}


def when_to_use() -> Rows:
    """What to expect of a workload, by how much KV is shared and how many requests run."""
    yield ("workload", "running requests", "expect on an H200")
    whole, _ = whole_gains()
    span = f"**{statistics.median(whole):.2f}** times the tokens/s of `fa3` ({min(whole):.2f} to {max(whole):.2f})"
    yield ("RL rollout, 16 samples of prompts of 4K, outputs of mean 700", "256", f"{span}: whole runs")
    short, long = (f"{rollout_gain(prompt_tokens):.2f}" for prompt_tokens in (1024, 16384))
    yield ("... prompts of 1K; of 16K", "256", f"{short}; {long}: steady windows, SGLang 0.5.16")
    yield ("reasoning rollouts: own parts longer than the prompt", "256", "about 1.0; not measured on 0.5.23")
    attention = attention_gains("gpu_drawn")
    for family, title in USES:
        plain, best = attention[family]
        yield (title, requests_of("gpu_drawn", family), f"attention alone: {plain:.2f} ({best:.2f})")
    times = [tokens_at("serving_conversations", "conversation:240", backend) for backend in BACKENDS]
    ours, *stock = (time for time in times if time is not None)
    chat = f"{min(stock) / ours:.2f} times the speed of a token, SGLang 0.5.16"
    yield ("chat: common system prompts", "8 new a second", chat)
    small, fits = batch_gain("offline_throughput_h200"), batch_gain("offline_throughput_h200_whole")
    batch = f"[`batch`](docs/offline.md): {fits:.2f} times as fast; {small:.2f} in a pool too small for them"
    yield ("files of prompts, 16 a document", "any", batch)
    yield ("nothing shared", "any", "1.0: steps use the stock backend")


def batch_gain(name: str) -> float:
    """Tokens per second of the batch runner over those of the fastest other way to run a file of prompts."""
    (measured,) = read(name)["workloads"].values()
    speeds = {way: run["output_tokens_per_second"] for way, run in measured["runs"].items()}
    ours = speeds["batch runner, prefixpack"]
    return float(ours / max(speed for way, speed in speeds.items() if not way.startswith("batch runner")))


# Family of the drawn batches: workload.
USES = (
    ("few_shot", "few-shot prompts"),
    ("long_documents", "RAG: several questions on a long document"),
    ("agents", "agents: common instructions, long histories"),
)


def tokens_at(name: str, workload: str, label: str, key: str = "tpot_ms") -> float | None:
    """Time per output token in ms: the median of the runs of a backend, None if there was none."""
    file = read(name)
    for medians in file.get("medians", []):
        if (medians["workload"], medians["backend"]) == (workload, label):
            return float(medians[key]["median"])
    for run in file["runs"]:
        if (run["workload"], run["label"]) == (workload, label):
            return float(run[key]["p50"])
    return None


# Result file, what its rows begin with, ours in it.
SERVERS = (
    ("serving_backends", "", OURS),
    ("serving_conversations", "", OURS),
    ("serving_fp8", "fp8 KV: ", f"{OURS}[inner_backend=flashinfer]"),
    ("serving_tp2", "two GPUs: ", OURS),
)
TITLES = {
    "rl": "RL",
    "rl:16": "RL, 16 prompts x 16 samples",
    "shared-prefix:16": "shared prefix",
    "conversation:240": "conversations, 240",
    "mooncake:80": "Mooncake, 80",
}


def servers() -> Rows:
    """Time per output token of each workload on each backend, and the time to the first one of ours and of fa3."""
    yield ("workload", "TPOT: ours", "`fa3`", "`flashinfer`", "gain", "TTFT: ours, `fa3`", "decode steps packed")
    for name, begin, ours in SERVERS:
        file = read(name)
        for workload in file["workloads"]:
            times = [tokens_at(name, workload, label) for label in (ours, *STOCK)]
            cells = ["" if time is None else f"{time:.{2 if time < 20 else 1}f} ms" for time in times]
            gain = min(time for time in times[1:] if time is not None) / (times[0] or 1)
            firsts = [tokens_at(name, workload, label, "ttft_ms") for label in (ours, "fa3")]
            first = ", ".join(f"{time:,.0f}" for time in firsts if time is not None)
            run = next(run for run in file["runs"] if (run["workload"], run["label"]) == (workload, ours))
            title = begin + TITLES.get(workload, workload.replace("no-sharing:", "no sharing, "))
            yield (title, *cells, f"{gain:.2f}", f"{first} ms", packed_steps(run))


def packed_steps(run: Mapping[str, Any]) -> str:
    """Decode steps of a run that ran packed, of all of them."""
    counted = run["prefixpack"]
    packed = counted["steps_packed"].get("decode", 0)
    routed = counted.get("routed_steps", {})
    return f"{packed:,} of {packed + routed.get('stock', routed.get('inner', 0)):,}"


TABLES: dict[str, Callable[[], Rows]] = {
    "when-to-use": when_to_use,
    "gains-by-load": functools.partial(gains_by_load, "gpu_drawn"),
    "gains": functools.partial(gains, "gpu_drawn"),
    "drawn-families": functools.partial(drawn, "gpu_drawn", ("bf16", "bf16_by_family"), "family"),
    "policies": policies,
    "rollouts": rollouts,
    "listed": functools.partial(listed, "gpu_attention"),
    "servers": servers,
}


def markdown(name: str) -> str:
    """A table of `TABLES` as Markdown."""
    head, *rows = TABLES[name]()
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines).replace("|  |", "| |") + "\n"


def refreshed(text: str) -> str:
    """A page with its tables written anew."""
    return MARKED.sub(lambda match: match.group(1) + markdown(match.group(2)) + match.group(3), text)


def pages() -> list[Path]:
    return [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := refreshed(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
