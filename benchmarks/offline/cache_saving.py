"""Share of prompt tokens saved (BatchLLM, equation 2) in offline batches, on SGLang's real queue and cache, no model.

    python -m benchmarks.offline.cache_saving [--requests 1600] [--out FILE.json] [--plot FILE.png]

The pool holds a tenth of the batch's unique tokens. Orders: as given (shuffled) and sorted, both as plain requests
under SGLang's default policy and LRU; as given with its longest-match-first policy (lpm; 128 requests waiting, as it
goes by arrival beyond that), with LFU, and with the refresh of waiting prefixes that SGLang 0.5.23 does; ours: grouped,
with the hooks of group scheduling. The limit computes every shared token once, which no order and no cache can beat.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
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
_LPM_WINDOW = 128
ORDERS = {
    "given": "given order, LRU",
    "sorted": "sorted, LRU",
    "lpm": "longest match first, LRU",
    "lfu": "given order, LFU",
    "refresh": "given order, LRU + refresh",
    "ours": "grouped (ours)",
}


def grouped_jobs(prompts: Tokens, tree: PrefixTree, output: int) -> list[Job]:
    """The requests as the batch runner hands them to an engine."""
    order = np.array(list(GroupOrder(tree, np.full(len(prompts), float(output)))))
    shared = consecutive_sharing(tree.prompts, order)
    return [
        Job(prompts[request], output, Place("job", number, int(shared[number]), output).encode())
        for number, request in enumerate(order.tolist())
    ]


def measure(prompts: Tokens, output: int, orders: Sequence[str], known: dict[str, Any]) -> dict[str, Any]:
    """One workload under these orders but the known ones; raises ReplayError when something hangs or leaks."""
    tree = PrefixTree(Prompts.from_lists(prompts))
    pool = int(tree.unique_tokens * _POOL_SHARE)
    given = [Job(prompt, output) for prompt in prompts]
    runs: dict[str, Callable[[], Result]] = {
        "given": lambda: Replay(pool).run(given),
        "sorted": lambda: Replay(pool).run([Job(prompt, output) for prompt in sorted(prompts)]),
        # Beyond 128 waiting requests SGLang goes by arrival instead.
        "lpm": lambda: Replay(pool, queue_policy="lpm", window=_LPM_WINDOW).run(given),
        "lfu": lambda: Replay(pool, eviction="lfu").run(given),
        "refresh": lambda: Replay(pool, refresh=True).run(given),
        "ours": lambda: Replay(pool, grouped=True, window=_WINDOW).run(grouped_jobs(prompts, tree, output)),
    }
    results: dict[str, Any] = dict(known)
    for name in orders:
        if name in known:
            continue
        started = time.perf_counter()
        result = runs[name]()
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
        "limit": round(tree.saving, 5),
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
        f"| prefix/own tokens x sharing | requests | pool | {' | '.join(ORDERS)} | limit | ours of limit |",
        "|" + "---|" * (len(ORDERS) + 5),
    ]
    for name, result in results.items():
        orders = result["orders"]
        savings = " | ".join(f"{orders[order]['saving']:.3f}" if order in orders else "" for order in ORDERS)
        share = f"{orders['ours']['saving'] / result['limit']:.2%}" if "ours" in orders else ""
        lines.append(
            f"| {name} | {result['requests']:,} | {result['pool_tokens']:,} | {savings} | {result['limit']:.3f} | "
            f"{share} |"
        )
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(results)
    figure, axes = plt.subplots(figsize=(10, 4.5))
    places = np.arange(len(names))
    width = 0.84 / len(ORDERS)
    for number, (order, label) in enumerate(ORDERS.items()):
        heights = [results[name]["orders"].get(order, {}).get("saving", 0.0) for name in names]
        axes.bar(places + (number - (len(ORDERS) - 1) / 2) * width, heights, width, label=label)
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
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="only workloads of these names")
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=list(ORDERS))
    parser.add_argument("--out", type=Path, help="JSON; what is in it is not measured again")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results = json.loads(args.out.read_text())["workloads"] if args.out and args.out.exists() else {}
    for name, prompts, output in workloads(args.requests, args.workloads):
        if args.settings and name not in args.settings:
            continue
        known = results.get(name, {"orders": {}})["orders"]
        results[name] = measure(prompts, output, args.orders, known)
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
