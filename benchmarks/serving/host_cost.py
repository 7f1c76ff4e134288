"""Host cost of a decode step: tracker and planner alone, on SGLang's real radix trees, while requests join and leave.

The whole of it in a real server is the column `host us` of `python -m benchmarks.serving`. This is wall time: on a busy
machine the mean contains what others took away, so the median is shown as well.

    python benchmarks/serving/host_cost.py --out benchmarks/results/host_cost.json
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
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.provenance import git_commit, machine_name, package_versions
from sgl_prefix_attn.abtest.judge import table_lines

SYSTEM_PROMPT = 64
GROUP_PROMPT = 32
OWN_PROMPT = 8
GROUP_SIZE = 8
TARGETS_US = {256: 100.0, 1024: 300.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024], help="running requests")
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a request")
    parser.add_argument("--changes", type=int, default=4, help="requests that leave, and that join, meanwhile")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    rows = [
        measure_tree(kind, count, options.steps, options.changes)
        for count in options.requests
        for kind in ("objects", "node_by_id", "collect_path_info")
    ]
    cells = [[f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    print("\n".join(table_lines([list(rows[0]), *cells])))
    if options.out:
        machine = {"machine": machine_name(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
        origin = {"date": date.today().isoformat(), "commit": git_commit(), **machine, "versions": package_versions()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**origin, "tree": rows}, indent=1) + "\n")
        print(f"written: {options.out}")


def make_prompts(generator: random.Random, count: int) -> list[list[int]]:
    """Prompts with a system prompt in common, one more prompt in common by group, and a few tokens of their own."""

    def tokens(length: int) -> list[int]:
        return [generator.randint(10, 1000) for _ in range(length)]

    system = tokens(SYSTEM_PROMPT)
    groups = [tokens(GROUP_PROMPT) for _ in range((count + GROUP_SIZE - 1) // GROUP_SIZE)]
    return [system + groups[index // GROUP_SIZE] + tokens(OWN_PROMPT) for index in range(count)]


def measure_tree(kind: str, count: int, steps: int, changes: int) -> dict[str, Any]:
    """Tracker and planner on a real radix tree with `count` running requests."""
    from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
    from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker
    from tests.support.small_scheduler import SmallScheduler

    generator = random.Random(count)
    prompts = make_prompts(generator, count + changes)
    scheduler = SmallScheduler(kind, slots=count * 400, rows=count + changes + 1, context=2048)

    def join(prompt: list[int]) -> None:
        request = scheduler.request(prompt)
        scheduler.match(request)
        scheduler.prefill_done(request)
        scheduler.running.append(request)

    for prompt in prompts[:count]:
        join(prompt)
    tracker = BatchTracker()
    planner = Planner(ModelShape(8, 2, 32, kv_bytes=4), DeviceModel.cpu(2))
    change_steps = {steps * (index + 1) // (changes + 1): index for index in range(changes)}
    took = []
    for step in range(steps + 1):
        if step in change_steps:
            scheduler.finish(generator.choice(scheduler.running))
            scheduler.filter()
            join(prompts[count + change_steps[step]])
        scheduler.decode()
        batch = scheduler.decode_batch()
        start = time.perf_counter()
        paths = tracker.step(batch)
        planner.plan(paths.forest, batch.seq_lens_cpu.numpy())
        took.append((time.perf_counter() - start) * 1e6)
    took = took[1:]  # the first look at all requests belongs to their prefills
    return {
        "kind": kind,
        "requests": count,
        "steps": steps,
        "mean_us": statistics.mean(took),
        "median_us": statistics.median(took),
        "change_us": statistics.mean(took[step - 1] for step in change_steps),
        "plans_made": planner.plans_made,
        "plans_reused": planner.plans_reused,
        "target_us": TARGETS_US.get(count),
    }


if __name__ == "__main__":
    main()
