"""Host cost of a step: what prefixpack adds on the scheduler thread before the model runs.

Two measurements, each at several numbers of running requests:

* server: the whole of it (reading the batch, forest, plan, hand-over) in SGLang's real scheduler process, while a tiny
  model decodes through the real engine and requests join and leave. Read from the counter `host_seconds` of the
  server's state in windows of a few steps; the first window, with the prefills, is shown apart.
* tree: tracker and planner alone on SGLang's real radix trees, without a server, by kind of tree.

Both are wall time: on a busy machine the mean contains what others took away, so the median window is shown as well.

    python benchmarks/serving/host_cost.py --out benchmarks/results/host_cost.json
"""

from __future__ import annotations

import argparse
import asyncio
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
from benchmarks.provenance import cpu_name, git_commit

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
    parser.add_argument("--window", type=float, default=0.5, help="seconds between two looks at the counters")
    parser.add_argument("--only", choices=["server", "tree"], help="one of the two measurements")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    results: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine()}
    if options.only != "tree":
        results["server"] = measure_server(options.requests, options.steps, options.changes, options.window)
        print_table("server: microseconds a decode step", results["server"])
    if options.only != "server":
        results["tree"] = [
            measure_tree(kind, count, options.steps, options.changes)
            for count in options.requests
            for kind in ("objects", "node_by_id", "collect_path_info")
        ]
        print_table("tree: microseconds a decode step, tracker and planner alone", results["tree"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written: {options.out}")


# In the real scheduler process --------------------------------------------------------------------------------------


def measure_server(counts: list[int], steps: int, changes: int, window: float) -> list[dict[str, Any]]:
    """One engine, all numbers of requests one after the other."""
    import sglang

    from sgl_prefix_attn.demo.tiny_model import tiny_model

    most = max(counts) + changes
    per_request = SYSTEM_PROMPT + GROUP_PROMPT + OWN_PROMPT + 2 * steps + 8
    engine = sglang.Engine(
        model_path=str(tiny_model()),
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        attention_backend="prefixpack",
        max_total_tokens=most * per_request,
        max_running_requests=most,
        context_length=2048,
        disable_cuda_graph=True,
        grammar_backend="none",
        log_level="error",
    )
    try:
        return [engine.loop.run_until_complete(_serve(engine, count, steps, changes, window)) for count in counts]
    finally:
        engine.shutdown()


async def _serve(engine: Any, count: int, steps: int, changes: int, window: float) -> dict[str, Any]:
    """Decodes `count` requests for `steps` steps; `changes` of them end early and as many others join."""
    generator = random.Random(count)
    print(f"{count} requests ...", file=sys.stderr, flush=True)
    prompts = make_prompts(generator, count + changes)
    lengths = [steps] * count + [steps // 2] * changes
    for index in range(changes):
        lengths[index * count // changes] = steps * (index + 1) // (changes + 2)

    async def generate(index: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": lengths[index], "ignore_eos": True}
        await engine.async_generate(input_ids=prompts[index], sampling_params=sampling)

    running = [asyncio.ensure_future(generate(index)) for index in range(count)]
    late = list(range(count, count + changes))
    samples = [await _counters(engine)]
    while not all(task.done() for task in running):
        await asyncio.sleep(window)
        samples.append(await _counters(engine))
        prefilled = samples[-1]["steps_packed"]["decode"] - samples[0]["steps_packed"]["decode"] > 4
        if late and prefilled:
            running.append(asyncio.ensure_future(generate(late.pop(0))))
    await asyncio.gather(*running)

    windows, total_steps, total_seconds = [], 0, 0.0
    start = next(i for i, s in enumerate(samples) if _decodes(s) - _decodes(samples[0]) > 4)
    for before, after in zip(samples[start:], samples[start + 1 :], strict=False):
        # Every packed step counts: the prefill of a request that joins is part of what a change costs.
        done = sum(after["steps_packed"].values()) - sum(before["steps_packed"].values())
        if done:
            seconds = after["host_seconds"] - before["host_seconds"]
            windows.append(seconds / done * 1e6)
            total_steps += done
            total_seconds += seconds
    first, last = samples[start], samples[-1]
    return {
        "requests": count,
        "steps": total_steps,
        "mean_us": total_seconds / total_steps * 1e6,
        "median_window_us": statistics.median(windows),
        "best_window_us": min(windows),
        "prefill_us": (first["host_seconds"] - samples[0]["host_seconds"]) * 1e6,
        "plans_made": last["plans_made"] - first["plans_made"],
        "plans_reused": last["plans_reused"] - first["plans_reused"],
        "target_us": TARGETS_US.get(count),
    }


async def _counters(engine: Any) -> dict[str, Any]:
    states = await engine.tokenizer_manager.get_internal_state()
    return states[0]["prefixpack"]["counters"]


def _decodes(counters: dict[str, Any]) -> int:
    return counters["steps_packed"]["decode"]


def make_prompts(generator: random.Random, count: int) -> list[list[int]]:
    """Prompts with a system prompt in common, one more prompt in common by group, and a few tokens of their own."""

    def tokens(length: int) -> list[int]:
        return [generator.randint(10, 1000) for _ in range(length)]

    system = tokens(SYSTEM_PROMPT)
    groups = [tokens(GROUP_PROMPT) for _ in range((count + GROUP_SIZE - 1) // GROUP_SIZE)]
    return [system + groups[index // GROUP_SIZE] + tokens(OWN_PROMPT) for index in range(count)]


# Without a server ----------------------------------------------------------------------------------------------------


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


# Output --------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    import torch

    from sgl_prefix_attn.sglang_plugin.compat.versions import installed_version

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sglang": installed_version(),
        "commit": git_commit(),
    }


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    cells = [[f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    print(f"\n{title}")
    for line in [columns, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
