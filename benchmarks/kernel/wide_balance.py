"""What the wide tiles of drawn batches lose to idle SMs and empty rows: a model, from plans and committed times.

    python -m benchmarks.kernel.wide_balance benchmarks/results/gpu_drawn_81308660.json

Batches with 16-bit KV and head_dim 128, grouped by the products' share of the limit. A plan's tiles of more than 32
rows go to CTAs, longest first. 64 keys of 128 rows take --pair us beside another CTA on the SM and --alone us without
one; tiles of up to 64 rows take --narrow of that. `idle`: an even share over the longest SM. `whole SM`: the same tiles
one to an SM at --whole us, over the time with two. Nothing but main loops counts.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.core.planner import DeviceModel, Planner
from sgl_prefix_attn.workloads import Case, draw_set

SMS = 132
BANDS = ((0.0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 1.01))
Steps = npt.NDArray[np.float64]


def loads(steps: Steps, workers: int) -> Steps:
    """Steps of each worker, where the longest item goes first to whoever has least."""
    queue = [(0.0, worker) for worker in range(workers)]
    for item in sorted(steps.tolist(), reverse=True):
        load, worker = queue[0]
        heapq.heapreplace(queue, (load + item, worker))
    found = np.zeros(workers)
    for load, worker in queue:
        found[worker] = load
    return found


def wide_steps(case: Case, narrow: float) -> tuple[Steps, float]:
    """KV tiles of 64 keys of each wide work tile, and the share of the computed rows that exist."""
    shape = case.shape
    device = DeviceModel.gpu(SMS, group=shape.group, head_dim=shape.head_dim, kv_bytes=shape.kv_bytes)
    items = np.asarray(Planner(shape, device).plan(case.forest(), case.lengths).items)
    ends = np.where(items[:, 4] < 0, np.asarray(case.lengths)[items[:, 2]], items[:, 4])
    keys, rows, wide = ends - items[:, 3], items[:, 1] * shape.group, items[:, 6] > 32
    computed = float((keys * np.ceil(rows / 64) * 64)[wide].sum())
    fill = float((keys * rows)[wide].sum()) / computed if computed else 1.0
    steps = (keys / 64 * np.where(items[:, 6] > 64, 1.0, narrow))[wide]
    return np.repeat(steps, shape.kv_heads), fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a result of gpu_drawn")
    parser.add_argument("--pair", type=float, default=1.9)
    parser.add_argument("--alone", type=float, default=1.25)
    parser.add_argument("--whole", type=float, default=0.85)
    parser.add_argument("--narrow", type=float, default=0.6)
    args = parser.parse_args()
    results = json.loads(args.results.read_text(encoding="utf-8"))
    rows = {row["key"]: row for row in results["rows"] if row["kv_dtype"] == "bf16" and row["head_dim"] == 128}
    found: dict[tuple[float, float], list[tuple[float, ...]]] = {band: [] for band in BANDS}
    for case in draw_set(results["seed"], results["cases"]):
        if case.key not in rows:
            continue
        row = rows[case.key]
        limits, ours = row["limits"], row["baselines"]["prefixpack"]["cold_us"]
        share = limits["mma_us"] / limits["limit_us"]
        steps, fill = wide_steps(case, args.narrow)
        idle = whole = 1.0
        if len(steps):
            first, second = np.split(loads(steps, 2 * SMS), 2)  # a worker of each half of an SM
            both, alone = np.minimum(first, second), np.abs(first - second)
            now = float((both * args.pair + alone * args.alone).max())
            idle = float(steps.sum()) * args.pair / (2 * SMS) / now
            whole = float(loads(steps, SMS).max()) * args.whole / now
        (band,) = (band for band in BANDS if band[0] <= share < band[1])
        found[band].append(((limits["limit_us"] + 12) / ours, fill, idle, whole, float(len(steps) > 0)))
    print("products / limit   batches  of floor  rows filled  idle  whole SM  with wide tiles")
    for (least, most), batches in found.items():
        floor, fill, idle, whole, wide = zip(*batches, strict=True)
        mean = statistics.geometric_mean
        print(
            f"{least:.1f} to {most:.1f} {len(batches):>15} {mean(floor):>9.3f} {statistics.mean(fill):>12.2f} "
            f"{mean(idle):>5.2f} {mean(whole):>9.2f} {sum(wide):>9.0f}"
        )


if __name__ == "__main__":
    main()
