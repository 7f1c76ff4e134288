"""Predicts mixed steps on an H200 three ways: all packed, prefill rows by fa3 and decode rows packed, all by fa3.

    python -m benchmarks.kernel.mixed_prediction --seed 1 --cases 120
    python -m benchmarks.kernel.mixed_prediction --check benchmarks/results/gpu_drawn.json

Packed rows are timed by the makespan simulator, rows of fa3 by the model below. Nothing is measured here: these are
predictions, to decide what is worth building. `mixed_steps` measures the same batches on a GPU.

Model of fa3: a tile has 128 rows (query, head of the group) of one request and KV head. 132 CTAs take tiles in order.
A tile takes a fixed time and a time for each key, by arithmetic or by the bandwidth of a CTA, whichever is longer. A
step takes at least the time of its bytes; repeated reads of shared KV count partly, for the L2 cache. KV is split, in
even shares of a CTA's work, only while the longest request has few tiles, as FA3's heuristic has it. Decode steps use
small tiles, whose arithmetic is hidden. The figures of decode steps are fitted to drawn batches (seed 2031093081); the
rate of wide tiles is an assumption, and so each prediction is made for two.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.kernel.mixed_cases import RowsCase, draw_mixed
from sgl_prefix_attn.simulator import H200, makespan
from sgl_prefix_attn.workloads import Case, draw_set
from sgl_prefix_attn.workloads.case import unique_tokens

SMS, TILE_ROWS, TILE_KEYS = 132, 128, 128
BANDWIDTH, CTA_BANDWIDTH = 4.3e12, 7.5e10  # bytes per second
BEGIN, TILE, COMBINE = 8.7e-6, 4.0e-6, 2.8e-6  # seconds of a call, of a tile, of a combine of splits
REPEATED = 0.6  # share of a byte that a repeated read takes
NO_SPLIT_FROM = 0.8 * SMS  # tiles of the longest request
RATES = (450e12, 600e12)  # of wide fa3 tiles: paged KV, causal
# Of our tiles of 128 rows: as fitted; by the 2.0 us that 64 keys took in time stamps; and at what others may win.
OUR_RATES = (H200["flops128"], 553e12, 350e12)
WAYS = ("packed", "split", "fa3", "fa3_split")
CHUNKS = ((512, 1024), (1024, 2048), (2048, 4096))


def fa3_seconds(case: Case, requests: slice, query_lens: Sequence[int], rate: float) -> float:
    """Seconds of one call over some requests of a batch."""
    lens, new = case.lengths[requests].tolist(), list(query_lens)
    group, heads = case.heads[0] // case.heads[1], case.heads[1]
    key_bytes = 2 * case.head_dim * 2
    decodes = max(new) == 1
    arithmetic = 0.0 if decodes else 4 * case.head_dim * TILE_ROWS / (rate / SMS)
    of_key = max(arithmetic, key_bytes / CTA_BANDWIDTH)
    tiles = [math.ceil(count * group / TILE_ROWS) for count in new]
    splits = heads * max(tiles) < NO_SPLIT_FROM
    blocks = [math.ceil(length / TILE_KEYS) for length in lens]
    share = max(1, math.ceil(1.1 * heads * sum(map(int.__mul__, blocks, tiles)) / SMS))
    times, combined = [], False
    for length, count, tile_count, block_count in zip(lens, new, tiles, blocks, strict=True):
        parts = max(1, math.ceil(block_count / share)) if splits else 1
        combined |= parts > 1
        for tile in range(1, tile_count + 1):
            keys = min(length, length - count + math.ceil(tile * TILE_ROWS / group))
            times += [TILE + of_key * keys / parts] * parts
    unique = unique_tokens(case.paths[requests], lens)
    streamed = heads * key_bytes * (unique + REPEATED * (sum(lens) - unique)) / BANDWIDTH
    return BEGIN + max(_in_order(times * heads), streamed) + combined * COMBINE


def _in_order(times: list[float]) -> float:
    """When the last of some tiles is done that CTAs take in order."""
    free = [0.0] * SMS
    for seconds in times:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def packed_seconds(step: RowsCase, requests: slice, rate: float) -> float:
    """Seconds of some requests in one plan."""
    plan, lens, device = step.plan(requests)
    return makespan(plan, lens, step.case.shape, device, {**H200, "flops128": rate}).seconds


def predicted(step: RowsCase, fa3_rate: float, our_rate: float) -> dict[str, float]:
    """Microseconds of each way."""
    count, first = len(step.query_lens), step.num_prefill
    everything, prefill, decode = slice(0, count), slice(0, first), slice(first, count)
    new = step.query_lens.tolist()
    prefill_rows = fa3_seconds(step.case, prefill, new[:first], fa3_rate)
    seconds = {
        "packed": packed_seconds(step, everything, our_rate),
        "split": prefill_rows + packed_seconds(step, decode, our_rate),
        "fa3": fa3_seconds(step.case, everything, new, fa3_rate),
        "fa3_split": prefill_rows + fa3_seconds(step.case, decode, new[first:], fa3_rate),
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def table(steps: list[RowsCase], fa3_rate: float, our_rate: float) -> list[str]:
    """Markdown rows by kind and chunk: fa3's time over each way's, and how often the split way wins by 5 %."""
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for step in steps:
        new = int(step.query_lens[: step.num_prefill].sum())
        low, high = next(((low, high) for low, high in CHUNKS if new < high), CHUNKS[-1])
        chunk = "few" if new < CHUNKS[0][0] else f"{low} to {high}"
        times = predicted(step, fa3_rate, our_rate)
        for key in ((step.case.family, chunk), (step.case.family, "all")):
            found[key].append(times)
    lines = []
    for (kind, chunk), times in sorted(found.items()):
        gains = [np.exp(np.mean([math.log(row["fa3"] / row[way]) for row in times])) for way in WAYS if way != "fa3"]
        # Against the better of the ways that exist: all packed and all stock.
        best = [min(row["packed"], row["fa3"]) / row["split"] for row in times]
        lines.append(
            f"| {kind} | {chunk} | {len(times)} | "
            + " | ".join(f"{gain:.2f}" for gain in gains)
            + f" | {np.exp(np.mean(np.log(best))):.2f} | {sum(ratio > 1.05 for ratio in best)} |"
        )
    return lines


def check(path: Path) -> str:
    """The model's error on decode steps with measured times of fa3."""
    results = json.loads(path.read_text(encoding="utf-8"))
    times = {row["key"]: row["baselines"].get("fa3", {}).get("cold_us") for row in results["rows"]}
    errors = []
    for case in draw_set(results["seed"], results["cases"]):
        us = times.get(case.key)
        if us is not None and case.kv_dtype == "bf16" and case.head_dim == 128:
            new = [1] * len(case.seq_lens)
            errors.append(abs(1e6 * fa3_seconds(case, slice(0, len(new)), new, RATES[0]) / us - 1))
    return (
        f"{len(errors)} decode steps: median error {np.median(errors):.1%}, 90 % within {np.quantile(errors, 0.9):.1%}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--check", type=Path, metavar="FILE", help="only compare the model of fa3 with measured steps")
    args = parser.parse_args(argv)
    if args.check is not None:
        print(check(args.check))
        return 0
    steps = draw_mixed(args.seed, args.cases)
    for fa3_rate in RATES:
        for our_rate in OUR_RATES:
            print(f"\nfa3 at {fa3_rate / 1e12:.0f} Tflop/s, ours at {our_rate / 1e12:.0f}; fa3's time over that of")
            print("| batch | chunk | cases | packed | split | fa3_split | split over best | wins by 5 % |")
            print("|---|---|---|---|---|---|---|---|")
            print("\n".join(table(steps, fa3_rate, our_rate)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
