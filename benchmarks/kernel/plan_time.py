"""Host time of planning for the decode batches of PAT's Figure 9: forest, plan, and plan amortised over a decode.

    python benchmarks/kernel/plan_time.py --out benchmarks/results/plan_time.json
    python benchmarks/kernel/plan_time.py --drawn --out benchmarks/results/plan_time_drawn.json

Plans are made for an H200 (the device model, no GPU needed), on one core. `amortised` is the mean time of
Planner.plan() over a decode of --steps tokens in which nobody joins or leaves, calls from Python included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed package, which is the measured one
import sgl_prefix_attn
from benchmarks.provenance import cpu_name
from benchmarks.workloads import draw_set
from benchmarks.workloads.committed import PAT_HEADS, PAT_TREES, tree_paths
from sgl_prefix_attn.core.forest import PrefixForest, RadixMirror
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner


def mirror_of(paths: list[list[tuple[int, int, int]]]) -> tuple[RadixMirror, np.ndarray, np.ndarray]:
    """The radix mirror that holds `paths`, with last node and prefix length of every request."""
    mirror = RadixMirror()
    last_nodes = np.full(len(paths), -1, dtype=np.int64)
    prefix_lens = np.zeros(len(paths), dtype=np.int64)
    for request, path in enumerate(paths):
        parent = -1
        for node, begin, end in path:
            if not mirror.known(node):
                mirror.put(parent, begin, [node], [end], leaf=False)
            parent = node
            prefix_lens[request] = end
        last_nodes[request] = parent
    return mirror, last_nodes, prefix_lens


def measure(tree: str, heads: tuple[int, int], repeats: int, steps: int) -> dict[str, object]:
    paths, lens = tree_paths(tree)
    mirror, last_nodes, prefix_lens = mirror_of(paths)
    shape = ModelShape(*heads, head_dim=128)
    device = DeviceModel.gpu(132, group=shape.group)
    start_lens = np.asarray(lens, dtype=np.int64)
    forest_us, plan_us, amortised_us = [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        forest: PrefixForest = mirror.forest(last_nodes, prefix_lens)
        forest_us.append((time.perf_counter() - start) * 1e6)
        planner = Planner(shape, device)
        seq_lens = start_lens.copy()
        start = time.perf_counter()
        plan = planner.plan(forest, seq_lens)
        plan_us.append((time.perf_counter() - start) * 1e6)
        spent = 0.0
        for _ in range(steps):
            seq_lens += 1
            start = time.perf_counter()
            planner.plan(forest, seq_lens)
            spent += time.perf_counter() - start
        amortised_us.append((spent * 1e6 + plan_us[-1]) / (steps + 1))
    planner = Planner(shape, device)
    plan = planner.plan(forest, start_lens)
    tokens = planner.kv_tokens
    return {
        "tree": tree,
        "q_heads": heads[0],
        "kv_heads": heads[1],
        "requests": len(paths),
        "items": len(plan.items),
        "partial_slots": plan.num_partials,
        "kv_tokens_packed": tokens.packed,
        "kv_tokens_per_request": tokens.per_request,
        "kv_tokens_unique": tokens.unique,
        "forest_us": statistics.median(forest_us),
        "plan_us": statistics.median(plan_us),
        "plan_us_max": max(plan_us),
        "amortised_us": statistics.median(amortised_us),
    }


def measure_drawn(seed: int, cases: int, repeats: int) -> list[dict[str, object]]:
    """Median and lowest time of a plan for each drawn batch, by calls from Python."""
    rows: list[dict[str, object]] = []
    for case in tqdm(draw_set(seed, cases), unit="batch", file=sys.stderr):
        device = DeviceModel.gpu(
            132, group=case.shape.group, head_dim=case.shape.head_dim, kv_bytes=case.shape.kv_bytes
        )
        forest, times = case.forest(), []
        for _ in range(repeats):
            planner = Planner(case.shape, device)
            start = time.perf_counter()
            plan = planner.plan(forest, case.lengths)
            times.append((time.perf_counter() - start) * 1e6)
        found = {"plan_us": statistics.median(times), "plan_us_min": min(times), "items": len(plan.items)}
        rows.append({"key": case.key, "requests": len(case.lengths), **found})
    return rows


def report_drawn(seed: int, args: argparse.Namespace) -> None:
    rows = measure_drawn(seed, args.cases, args.repeats)
    times = [float(str(row["plan_us"])) for row in rows]
    summary = {
        "median_us": statistics.median(times),
        "longest_us": max(times),
        "above_150_us": sum(taken > 150 for taken in times),
    }
    print(f"seed {seed}, {len(rows)} batches: " + ", ".join(f"{name} {value:.0f}" for name, value in summary.items()))
    if args.out:
        write(args.out, {"seed": seed, "repeats": args.repeats, "summary": summary, "rows": rows})


def write(path: Path, result: dict[str, object]) -> None:
    machine = {"cpu": cpu_name(), "python": platform.python_version(), "package": sgl_prefix_attn.__version__}
    path.write_text(json.dumps({"machine": machine, **result}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="plans per tree; the median is reported (default 50)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to amortise over (default 64)")
    parser.add_argument("--drawn", action="store_true", help="plan drawn batches instead")
    parser.add_argument("--seed", type=int, help="of --drawn (default: drawn now)")
    parser.add_argument("--cases", type=int, default=300, help="batches of --drawn (default 300)")
    parser.add_argument("--out", type=Path, help="write the rows and the machine as JSON")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if args.drawn:
        report_drawn(random.SystemRandom().randrange(2**31) if args.seed is None else args.seed, args)
        return
    cases = [(number, tree, heads) for heads in PAT_HEADS for number, tree in enumerate(PAT_TREES, 1)]
    rows = []
    for number, tree, heads in tqdm(cases, unit="tree", file=sys.stderr):
        rows.append({"number": number, **measure(tree, heads, args.repeats, args.steps)})
    print(
        f"{'#':>3} {'heads':>6} {'requests':>8} {'items':>6} {'forest us':>10} {'plan us':>8} {'amortised us':>13} "
        f"{'reads saved':>11} {'limit':>6}  tree"
    )
    for row in rows:
        saved = row["kv_tokens_per_request"] / row["kv_tokens_packed"]
        limit = row["kv_tokens_per_request"] / row["kv_tokens_unique"]
        print(
            f"{row['number']:>3} {row['q_heads']}/{row['kv_heads']:<3} {row['requests']:>8} {row['items']:>6} "
            f"{row['forest_us']:>10.1f} {row['plan_us']:>8.1f} {row['amortised_us']:>13.2f} {saved:>10.2f}x "
            f"{limit:>5.2f}x  {row['tree']}"
        )
    print(
        f"longest plan (median): {max(row['plan_us'] for row in rows):.1f} us; "
        f"longest amortised: {max(row['amortised_us'] for row in rows):.2f} us"
    )
    if args.out:
        write(args.out, {"arguments": {"repeats": args.repeats, "steps": args.steps}, "rows": rows})


if __name__ == "__main__":
    main()
