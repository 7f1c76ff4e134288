"""Host cost of a decode step in two checkouts, measured in turns: batch, paths, plan and decision, without the model.

    python -m benchmarks.serving.host_cost_pair --before OTHER_CHECKOUT --out FILE

Each checkout has a process with SGLang's real radix tree and our backend on a small pool. Both run the same requests
and steps. Times are those of the thread on its processor. The minimum over all rounds is taken for each step, as other
work on the machine only adds to it. Cases:

* steady: the requests of a step are those of the step before. Every eighth step asks the planner.
* change: a request has left, and one has joined.
* nine plans: the native planner's time for all plans of a run, a part of the decisions of steps with a change.
* plan, H200 and plan, CPU: the native planner's time for one plan with the figures of these devices, 32 query heads
  and 8 KV heads of 128. "groups": 64 tokens of all and 32 of each eight requests, as in the steps; "long": 2,048 and
  512 to 2,048; "rollout": 4,096 of each sixteen. The least of 20 plans in a row, mean over nine batches.
* stock: a step without paths, as the backend hands it to the stock backend.
* layer: one packed layer of a batch of one request, SGLang's store of K and V included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, CHANGES, REPEATS, BATCHES, PLANS = 96, 8, 200, 9, 20
TREES = ("objects", "node_by_id")


def module(*names: str) -> Any:
    """The first of these modules that the checkout has; version 0.3 had other names."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(names[-1])


def paths_of(batch: str, count: int, dice: random.Random) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Shared segments (node, begin, end) and length of each request."""
    paths = []
    for request in range(count):
        group = 1 + request // 8
        if batch == "rollout":
            paths.append([(1 + request // 16, 0, 4096)])
        else:
            begin, size = (64, 32) if batch == "groups" else (2048, 512 * (1 + group % 4))
            paths.append([(0, 0, begin), (group, begin, begin + size)])
    own = {"groups": 48, "long": 1500, "rollout": 700}[batch]
    return paths, [path[-1][2] + 1 + dice.randrange(own) for path in paths]


def microseconds(body: Callable[[], Any]) -> float:
    begin = time.thread_time_ns()
    body()
    return (time.thread_time_ns() - begin) / 1e3


class Worker:
    """The measurements of the checkout that is imported."""

    def __init__(self) -> None:
        fixtures = module("tests.sglang_plugin.fixture", "tests.plugin.attention_world")
        self.make = getattr(fixtures, "Fixture", None) or fixtures.World
        self.handed = fixtures.Handed
        self.scheduler = importlib.import_module("tests.support.small_scheduler").SmallScheduler
        self.make_prompts = importlib.import_module("benchmarks.serving.host_cost").make_prompts

    def steps(self, kind: str, count: int) -> dict[str, list[float]]:
        """Microseconds of each step, with a change and without."""
        dice = random.Random(count)
        prompts = iter(self.make_prompts(dice, count + CHANGES))
        scheduler = self.scheduler(kind, slots=count * 400, rows=count + CHANGES + 1, context=2048)
        fixture = self.make([[(1, 0, 4)], [(1, 0, 4)]], [6, 6])

        def join() -> None:
            request = scheduler.request(next(prompts))
            scheduler.match(request)
            scheduler.prefill_done(request)
            scheduler.running.append(request)

        for _ in range(count):
            join()
        changes = {STEPS * (index + 1) // (CHANGES + 1) for index in range(CHANGES)}
        took = {f"{part}: {half}": [] for part in ("steady", "change") for half in ("paths", "decision")}
        for step in range(STEPS):
            if step in changes:
                scheduler.finish(dice.choice(scheduler.running))
                scheduler.filter()
                join()
            scheduler.decode()
            batch = scheduler.decode_batch()
            forward_batch = fixture.batch
            forward_batch.batch_size = count
            forward_batch.req_pool_indices = batch.req_pool_indices
            forward_batch.seq_lens = forward_batch.seq_lens_cpu = batch.seq_lens_cpu

            begin = time.thread_time_ns()
            handed = fixture.handover.read(batch)
            read = time.thread_time_ns()
            with fixture.handover.handed_over(handed):
                fixture.backend.init_forward_metadata(forward_batch)
            end = time.thread_time_ns()
            if step:  # the first look at all requests belongs to their prefills
                part = "change" if step in changes else "steady"
                took[f"{part}: paths"].append((read - begin) / 1e3)
                took[f"{part}: decision"].append((end - read) / 1e3)
        (record,) = fixture.backend._executor.planners
        took["nine plans"] = [1e6 * record.plan_seconds]
        assert not fixture.fallbacks, fixture.fallbacks
        return took

    def plans(self, count: int) -> dict[str, list[float]]:
        """Microseconds of a plan for each batch."""
        import numpy as np

        core = importlib.import_module("sgl_prefix_attn.core.planner")
        forest = importlib.import_module("sgl_prefix_attn.core.forest").PrefixForest
        shape = core.ModelShape(q_heads=32, kv_heads=8, head_dim=128)
        took: dict[str, list[float]] = {}
        for device, model in (("H200", core.DeviceModel.gpu(132, group=4)), ("CPU", core.DeviceModel.cpu(2))):
            for batch in ("groups", "long", "rollout"):
                dice, planner = random.Random(count), core.Planner(shape, model)
                drawn = [paths_of(batch, count, dice) for _ in range(BATCHES)]
                batches = [(forest.from_paths(paths), np.array(lens, dtype=np.int64)) for paths, lens in drawn]
                least = [float("inf")] * BATCHES
                for _ in range(PLANS):
                    for index, (tree, lens) in enumerate(batches):
                        before = planner.plan_seconds
                        planner.plan(tree, lens)
                        least[index] = min(least[index], 1e6 * (planner.plan_seconds - before))
                took[f"plan, {device}: {batch}"] = least
        return took

    def stock(self) -> dict[str, list[float]]:
        fixture = self.make([[(1, 0, 4)], [(1, 0, 4)]], [6, 6])
        handed = self.handed("no_paths")

        def body() -> None:
            with fixture.handover.handed_over(handed):
                fixture.backend.init_forward_metadata(fixture.batch)

        return {"stock": [microseconds(body) for _ in range(REPEATS)]}

    def layer(self) -> dict[str, list[float]]:
        fixture = self.make([[(1, 0, 4)]], [6])
        layer = fixture.layers[0]
        q, k, v = fixture.qkv(layer)
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)

        def body() -> None:
            fixture.backend.forward_decode(q, k, v, layer, fixture.batch, save_kv_cache=True)

        return {"layer": [microseconds(body) for _ in range(REPEATS)]}


def work() -> None:
    """Answers each line of the input, the arguments of a case, with a line of JSON."""
    import torch

    torch.set_num_threads(1)
    worker = Worker()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("result", json.dumps(getattr(worker, name)(*arguments)), flush=True)


class Checkout:
    """A process that measures a checkout."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--work"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        self.commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    def ask(self, case: list[Any]) -> dict[str, list[float]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("result "):
                return json.loads(line.removeprefix("result "))
        raise RuntimeError(f"the process of commit {self.commit} has ended")


def summary(case: list[Any], runs: dict[str, list[dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """A row for each kind of step: the mean over its steps of the minima over all rounds."""
    rows = []
    for part in runs["before"][0]:
        row: dict[str, Any] = {"case": part}
        if len(case) > 2:
            row["tree"] = case[1]
        if len(case) > 1:
            row["requests"] = case[-1]
        for label in ("before", "after"):
            lists = [run[part] for run in runs[label]]
            if part in ("stock", "layer"):  # all calls are alike
                row[f"{label}_us"] = round(min(map(min, lists)), 2)
            else:
                row[f"{label}_us"] = round(statistics.fmean(map(min, zip(*lists, strict=True))), 2)
            row[f"{label}_median_us"] = round(statistics.median(value for values in lists for value in values), 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the other checkout, with its native module built")
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    if options.before is None:
        parser.error("--before is missing")
    checkouts = {"before": Checkout(options.before.resolve()), "after": Checkout(Path(__file__).resolve().parents[2])}
    cases: list[list[Any]] = [["steps", kind, count] for count in options.requests for kind in TREES]
    rows: list[dict[str, Any]] = []
    plans = [["plans", count] for count in options.requests]
    for case in [["stock"], ["layer"], *plans, *cases]:
        runs: dict[str, list[dict[str, list[float]]]] = {"before": [], "after": []}
        for number in range(options.rounds):
            for label in ("before", "after") if number % 2 == 0 else ("after", "before"):
                runs[label].append(checkouts[label].ask(case))
        rows += summary(case, runs)
        print(rows[-len(runs["before"][0]) :], file=sys.stderr, flush=True)
    from benchmarks.serving.host_cost import machine

    commits = {label: checkout.commit for label, checkout in checkouts.items()}
    results = {
        "machine": machine(),
        "commits": commits,
        "rounds": options.rounds,
        "seed": "the number of requests of each row",
        "rows": rows,
    }
    for checkout in checkouts.values():
        assert checkout.process.stdin is not None
        checkout.process.stdin.close()
        checkout.process.wait()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
