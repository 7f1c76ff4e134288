"""Writes the tables of README.md and docs/ from the files in benchmarks/results.

    python -m benchmarks.doc_tables

A table stands between `<!-- table: NAME -->` and `<!-- end table -->`. To show a new measurement, replace its file in
benchmarks/results, or change the file's name in `TABLES`, and run this.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.doc_kernel_tables import (
    Rows,
    attention_gains,
    drawn,
    gains,
    gains_by_load,
    gains_by_sharing,
    listed,
    policies,
    read,
    requests_of,
    verify,
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
    """Rollouts with drawn lengths: ours beside the stock backends, by length of the prompts."""
    yield ("prompts", "", *(f"`{backend}`" for backend in BACKENDS))
    for prompt_tokens in ROLLOUTS:
        runs = rollout_runs(prompt_tokens)
        steps = {backend: run["steps"] for backend, run in runs.items()}
        cells = {backend: f"{step['decode_step_ms']['256-287']:.0f} ms" for backend, step in steps.items()}
        shares = {backend: f"{step['share_of_time_with_prefill']:.0%}"[:-1] + " %" for backend, step in steps.items()}
        packed, routed = runs[OURS]["routed_steps"]["packed"], sum(runs[OURS]["routed_steps"].values())
        title = PROMPTS[prompt_tokens]
        yield (title, "output tokens per second", *rollout_speeds(prompt_tokens))
        yield (title, "decode step, 256 running", *(cells.get(backend, "not measured") for backend in BACKENDS))
        yield (title, "time in steps after a prefill", *(shares.get(backend, "not measured") for backend in BACKENDS))
        yield (title, "decode steps packed", f"{packed:,} of {routed:,}", *("" for _ in STOCK))


def rollout_speeds(prompt_tokens: int) -> list[str]:
    """Output tokens per second by backend, and the gain over the faster stock backend."""
    speeds = {backend: run["tokens_per_second"] for backend, run in rollout_runs(prompt_tokens).items()}
    gain = speeds[OURS] / max(speed for backend, speed in speeds.items() if backend != OURS)
    cells = {backend: f"{speed:,.0f}" for backend, speed in speeds.items()}
    cells[OURS] = f"**{cells[OURS]}** ({gain:.2f}x)"
    return [cells.get(backend, "not measured") for backend in BACKENDS]


def tokens_at(name: str, workload: str, label: str) -> float | None:
    """Time per output token in ms: the median of the runs of a backend, None if there was none."""
    file = read(name)
    for medians in file.get("medians", []):
        if (medians["workload"], medians["backend"]) == (workload, label):
            return float(medians["tpot_ms"]["median"])
    for run in file["runs"]:
        if (run["workload"], run["label"]) == (workload, label):
            return float(run["tpot_ms"]["p50"])
    return None


STOCK = ("fa3", "flashinfer")
BACKENDS = (OURS, *STOCK)
# Length of prompts: result file.
ROLLOUTS = {1024: "serving_rollout_1k_4k", 4096: "serving_rollout_1k_4k", 16384: "serving_rollout_16k"}
PROMPTS = {1024: "1K", 4096: "4K", 16384: "16K"}
SERVERS = {
    "16 groups of 16 requests on one system prompt each": ("serving_backends", "shared-prefix:16"),
    "conversations, three-level system prompts, 8 a second": ("serving_conversations", "conversation:240"),
    "nothing shared, 64 requests": ("serving_backends", "no-sharing:64"),
}


def rollout_title(prompt_tokens: int) -> str:
    return f"RL rollout, prompts of about {PROMPTS[prompt_tokens]}, drawn output lengths"


def gains_of_servers() -> dict[str, tuple[float, str]]:
    """By workload: speed over the faster stock backend, and its name. Rollouts by tokens/s, others by their time."""
    found = {}
    for prompt_tokens in ROLLOUTS:
        speeds = {backend: run["tokens_per_second"] for backend, run in rollout_runs(prompt_tokens).items()}
        best = max(speeds.keys() - {OURS}, key=speeds.__getitem__)
        found[rollout_title(prompt_tokens)] = (speeds[OURS] / speeds[best], best)
    for title, (name, workload) in SERVERS.items():
        times = {backend: tokens_at(name, workload, backend) for backend in BACKENDS}
        known = {backend: time for backend, time in times.items() if time is not None}
        best = min(known.keys() - {OURS}, key=known.__getitem__)
        found[title] = (known[best] / known[OURS], best)
    return found


def results_of_servers() -> Rows:
    """Output tokens per second of rollouts; time per output token of other workloads."""
    yield ("workload", "unit", *(f"`{backend}`" for backend in BACKENDS), "commit")
    for prompt_tokens, name in ROLLOUTS.items():
        yield (rollout_title(prompt_tokens), "tokens/s", *rollout_speeds(prompt_tokens), commit_of(name))
    gains = gains_of_servers()
    for title, (name, workload) in SERVERS.items():
        times = [tokens_at(name, workload, backend) for backend in BACKENDS]
        cells = ["not measured" if time is None else f"{time:.2f}" for time in times]
        gain = gains[title][0]
        cells[0] = f"**{cells[0]}** ({gain:.2f}x)" if gain > 1.02 else f"{cells[0]} ({gain:.2f}x)"
        yield (title, "ms a token", *cells, commit_of(name))


def commit_of(name: str) -> str:
    return str(read(name)["commit"])[:7]


def when_to_use() -> Rows:
    """What to expect of a workload, by how much KV is shared and how many requests run."""
    yield ("workload", "shared KV", "running requests", "expect on an H200")
    for prompt_tokens in ROLLOUTS:
        gain, _ = gains_of_servers()[rollout_title(prompt_tokens)]
        shared = "a part" if prompt_tokens < 4096 else "most of it"
        title = f"RL rollout, 16 samples of prompts of {PROMPTS[prompt_tokens]}"
        yield (title, shared, "256", f"{gain:.2f} times the tokens/s")
    attention = attention_gains("gpu_drawn")
    for family, title, shared in USES:
        requests = requests_of("gpu_drawn", family)
        plain, best = attention[family]
        yield (title, shared, requests, f"attention {plain:.2f} times as fast ({best:.2f})")
    conversations, _ = gains_of_servers()["conversations, three-level system prompts, 8 a second"]
    yield ("chat: common system prompts", "a part", "8 new ones a second", f"{conversations:.2f} times the speed")
    (measured,) = read("offline_throughput_h200")["workloads"].values()
    ours, stock = (measured["runs"][run]["seconds"][0] for run in ("batch runner, prefixpack", f"{SORTED}, fa3"))
    batch = f"[`batch`](docs/offline.md): {stock / ours:.2f} times as fast, small KV pool"
    yield ("files of prompts, 16 a document", "most of it", "any", batch)
    yield ("nothing shared", "none", "any", "no change: steps run on the stock backend")


SORTED = "Engine.generate, sorted"
# Family of the drawn batches: workload, shared KV.
USES = (
    ("few_shot", "few-shot prompts", "most of it"),
    ("long_documents", "RAG: several questions on a long document", "most of it"),
    ("agents", "agents: common instructions, long histories", "a part"),
)
TITLES = {
    "rl": "RL",
    "rl:16": "RL, 16 prompts x 16 samples",
    "shared-prefix:16": "shared prefix",
    "conversation:240": "conversations, 240",
    "mooncake:80": "Mooncake, 80",
}


def server_runs(name: str) -> Rows:
    """Each backend's first run of each workload; medians of all runs where a backend ran several times."""
    file = read(name)
    yield ("workload", "backend", "TTFT p50", "TPOT p50", "output tokens/s", "decode steps packed")
    medians = {(each["workload"], each["backend"]): each for each in file.get("medians", [])}
    order = list(file["workloads"])
    seen: set[tuple[str, str]] = set()
    labels = list(dict.fromkeys(run["label"] for run in file["runs"]))
    labels.sort(key=lambda label: (not label.startswith(OURS), label))
    for run in sorted(file["runs"], key=lambda run: (order.index(run["workload"]), labels.index(run["label"]))):
        key = (run["workload"], run["label"])
        if key in seen or (run["label"] not in file["servers"]):
            continue
        seen.add(key)
        several = medians.get(key)
        ttft = several["ttft_ms"]["median"] if several else run["ttft_ms"]["p50"]
        tpot = several["tpot_ms"]["median"] if several else run["tpot_ms"]["p50"]
        speed = several["output_tokens_per_second"]["median"] if several else run["output_tokens_per_second"]
        workload = run["workload"]
        title = TITLES.get(workload, workload.replace("no-sharing:", "no sharing, "))
        yield (
            title,
            f"`{run['label']}`".replace("inner_backend", "stock_backend"),
            f"{ttft:,.0f} ms",
            f"{tpot:,.{2 if tpot < 20 else 1}f} ms",
            f"{speed:,.0f}",
            packed_steps(run),
        )


def host_work(names: Sequence[str]) -> Rows:
    """Host time of the plug-in by workload: mean over the steps of a run, median of the runs."""
    yield ("workload", "runs", "us in a step")
    for name in names:
        every: dict[str, list[float]] = {}
        for run in read(name)["runs"]:
            if (host := run.get("host_us_per_step")) is not None:
                every.setdefault(run["workload"], []).append(host)
        for workload, hosts in every.items():
            title = TITLES.get(workload, workload.replace("no-sharing:", "no sharing, "))
            yield (title, str(len(hosts)), f"{statistics.median(hosts):.0f}")


def packed_steps(run: Mapping[str, Any]) -> str:
    """Decode steps of a run that ran packed, of all of them; empty for a stock backend."""
    counted = run.get("prefixpack")
    if not counted:
        return ""
    packed = counted["steps_packed"].get("decode", 0)
    routed = counted.get("routed_steps", {})
    stock = routed.get("stock", routed.get("inner", 0))
    return f"{packed:,} of {packed + stock:,}"


def routes(name: str) -> Rows:
    """Time per output token without sharing, by the setting `route`."""
    labels = ("fa3", f"{OURS}[route=packed]", f"{OURS}[route=auto]")
    yield ("no sharing", "`fa3`", "`route=packed`", "`route=auto`")
    for requests in (1, 8, 32, 64):
        times = [tokens_at(name, f"no-sharing:{requests}", label) for label in labels]
        yield (f"{requests} requests" if requests > 1 else "1 request", *(f"{time:.2f} ms" for time in times))


TABLES: dict[str, Callable[[], Rows]] = {
    "when-to-use": when_to_use,
    "gains-by-load": functools.partial(gains_by_load, "gpu_drawn"),
    "gains": functools.partial(gains, "gpu_drawn"),
    "gains-by-sharing": functools.partial(gains_by_sharing, "gpu_drawn"),
    "drawn-families": functools.partial(drawn, "gpu_drawn", ("bf16", "bf16_by_family"), "family"),
    "drawn-h100": functools.partial(drawn, "gpu_drawn_h100", ("bf16", "bf16_by_family"), "family"),
    "drawn-heads": functools.partial(drawn, "gpu_drawn", ("bf16_by_heads",), "q heads / KV heads"),
    "verify-families": verify,
    "policies": policies,
    "rollouts": rollouts,
    "listed": functools.partial(listed, "gpu_attention"),
    "routes": functools.partial(routes, "serving_routes"),
    "results-of-servers": results_of_servers,
    "serving-backends": functools.partial(server_runs, "serving_backends"),
    "serving-conversations": functools.partial(server_runs, "serving_conversations"),
    "host-work": functools.partial(host_work, ("serving_backends", "serving_conversations")),
    "serving-fp8": functools.partial(server_runs, "serving_fp8"),
    "serving-tp2": functools.partial(server_runs, "serving_tp2"),
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
