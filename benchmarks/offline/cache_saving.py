"""Share of prompt tokens saved (BatchLLM, equation 2) in offline batches, on SGLang's real queue and cache, no model.

    python -m benchmarks.offline.cache_saving [--requests 1600] [--out FILE.json] [--plot FILE.png]

The pool holds a tenth of the batch's unique tokens. Orders: as given (shuffled) and sorted, both as plain requests
under SGLang's default policy and LRU; ours: grouped, with the hooks of group scheduling. The limit computes every
shared token once, which no order and no cache can beat.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.offline.replay import Job, Replay, Result
from benchmarks.offline.workloads import Setting, Tokens, industry, long_prefixes, microbenchmarks
from sgl_prefix_attn.offline.group_order import GroupOrder
from sgl_prefix_attn.offline.prefix_tree import PrefixTree, consecutive_sharing
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.queue_order import Place

_POOL_SHARE = 0.1
_WINDOW = 512  # the batch runner's default
ORDERS = ("given", "sorted", "ours")


def grouped_jobs(prompts: Tokens, tree: PrefixTree, output: int) -> list[Job]:
    """As the batch runner hands them to an engine."""
    order = np.array(list(GroupOrder(tree, np.full(len(prompts), float(output)))))
    shared = consecutive_sharing(tree.prompts, order)
    return [
        Job(prompts[request], output, Place("job", number, int(shared[number]), output).encode())
        for number, request in enumerate(order.tolist())
    ]


def measure(prompts: Tokens, output: int) -> dict[str, Any]:
    """One workload under every order; raises ReplayError when something hangs or leaks."""
    tree = PrefixTree(Prompts.from_lists(prompts))
    pool = int(tree.unique_tokens * _POOL_SHARE)
    runs = {
        "given": (False, None, [Job(prompt, output) for prompt in prompts]),
        "sorted": (False, None, [Job(prompt, output) for prompt in sorted(prompts)]),
        "ours": (True, _WINDOW, grouped_jobs(prompts, tree, output)),
    }
    results: dict[str, Any] = {}
    limit, ours = tree.saving, 0.0
    for name, (grouped, window, jobs) in runs.items():
        started = time.perf_counter()
        result: Result = Replay(pool, grouped=grouped, window=window).run(jobs)
        ours = result.saving  # the last one
        results[name] = {
            "saving": round(result.saving, 5),
            "steps": result.steps,
            "prefill_steps": result.prefill_steps,
            "retractions": result.retractions,
            "most_running": result.most_running,
            "held_back": result.held_back,
            "seconds": round(time.perf_counter() - started, 1),
        }
    return {
        "requests": len(prompts),
        "unique_tokens": tree.unique_tokens,
        "pool_tokens": pool,
        "limit": round(limit, 5),
        "ours_of_limit": round(ours / limit, 5),
        "orders": results,
    }


def workloads(requests: int, names: Sequence[str]) -> list[tuple[str, Tokens, int]]:
    settings: list[Setting] = []
    if "micro" in names:
        settings += microbenchmarks(requests)
    if "long" in names:
        settings += long_prefixes(max(64, requests // 4))
    batches = [(setting.name, setting.prompts(), setting.output) for setting in settings]
    if "industry" in names:
        batches.append(("industry-like", industry(requests * 5), 100))
    return batches


def table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | requests | pool | given order | sorted | ours | limit | ours of limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        savings = " | ".join(f"{result['orders'][order]['saving']:.3f}" for order in ORDERS)
        lines.append(
            f"| {name} | {result['requests']:,} | {result['pool_tokens']:,} | {savings} | {result['limit']:.3f} | "
            f"{result['ours_of_limit']:.2%} |"
        )
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(results)
    figure, axes = plt.subplots(figsize=(10, 4.5))
    places = np.arange(len(names))
    for number, (order, label) in enumerate(
        zip(ORDERS, ("given order, LRU", "sorted, LRU", "grouped (ours)"), strict=True)
    ):
        heights = [results[name]["orders"][order]["saving"] for name in names]
        axes.bar(places + (number - 1) * 0.27, heights, 0.25, label=label)
    for place, name in enumerate(names):
        axes.hlines(results[name]["limit"], place - 0.42, place + 0.42, colors="black", linestyles="dotted")
    axes.plot([], [], "k:", label="limit")
    axes.set_xticks(places, names, rotation=30, ha="right")
    axes.set_ylabel("share of prompt tokens saved")
    axes.set_title("A pool of a tenth of the unique tokens (prefix/own tokens x requests that share)")
    axes.legend(ncols=4, loc="upper left")
    axes.set_ylim(0, 1.15)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1600, help="a setting (long prefixes: a quarter; industry: x5)")
    parser.add_argument(
        "--workloads", nargs="+", default=["micro", "long", "industry"], choices=["micro", "long", "industry"]
    )
    parser.add_argument("--out", type=Path, help="JSON; workloads that are in it and not asked for stay")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results = json.loads(args.out.read_text())["workloads"] if args.out and args.out.exists() else {}
    for name, prompts, output in workloads(args.requests, args.workloads):
        results[name] = measure(prompts, output)
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
        if args.out:
            record = {"pool_share": _POOL_SHARE, "window": _WINDOW, "sglang": _sglang_version(), "workloads": results}
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(results))
    if args.plot:
        plot(results, args.plot)
    return 0


def _sglang_version() -> str:
    from importlib.metadata import version

    return version("sglang")


if __name__ == "__main__":
    sys.exit(main())
