"""Decode steps of a real CPU server with retention on and off, while its full prefix cache evicts.

    python -m benchmarks.cache.retention_server --out benchmarks/results/retention_server.json

The pool has 56 tokens a branch, and as many prompts of 64 tokens are computed first, so it is full and evicts. Then
32 requests with prompts of 64 tokens decode 150 steps. Two servers, one with retention, run that in turns, with a new
pair of servers in each round. `step_ms` is the time between two tokens of a streamed request. `step_cpu_ms` is the time
of the scheduler's thread on a processor, so other work on the machine changes it less.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.serving.host_cost import machine

PROMPT, REQUESTS, STEPS, POOL = 64, 32, 150, 56
VOCABULARY = range(10, 1000)
MODES = ("off", "on")


def serve(pipe: Connection, branches: int, retention: bool) -> None:
    """Starts a server, fills its cache, then answers each message with the figures of one run."""
    os.environ["PREFIXPACK_RETENTION"] = "reuse" if retention else "off"
    import sglang

    from sgl_prefix_attn.demo.tiny_model import tiny_model

    engine = sglang.Engine(
        model_path=str(tiny_model()),
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        attention_backend="prefixpack",
        max_total_tokens=POOL * branches,
        max_running_requests=2 * REQUESTS,
        context_length=512,
        disable_cuda_graph=True,
        sleep_on_idle=True,  # the other server is measured meanwhile
        grammar_backend="none",
        log_level="error",
    )
    load = Load(engine, branches)
    run = engine.loop.run_until_complete
    try:
        pipe.send(run(load.fill()))
        while pipe.recv() == "run":
            pipe.send(run(load.decode()))
        pinning = run(engine.tokenizer_manager.get_internal_state())[0].get("prefixpack_pinning", {})
        assert bool(pinning) == retention
        assert pinning.get("failures", 0) == 0, pinning
        pipe.send(pinning)
    finally:
        engine.shutdown()


class Load:
    """The requests to one server."""

    def __init__(self, engine: Any, branches: int) -> None:
        self._engine, self._branches = engine, branches
        self._dice = random.Random(branches)

    def _request(self, tokens: int, **options: Any) -> Any:
        prompt = self._dice.choices(VOCABULARY, k=PROMPT)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return self._engine.async_generate(input_ids=prompt, sampling_params=sampling, **options)

    async def fill(self) -> float:
        """Computes a prompt for each branch; returns the seconds."""
        started = time.perf_counter()
        for begin in range(0, self._branches, 256):
            await asyncio.gather(*(self._request(1) for _ in range(begin, min(begin + 256, self._branches))))
        return time.perf_counter() - started

    async def decode(self) -> dict[str, float]:
        """Milliseconds a step."""
        others = [asyncio.ensure_future(self._request(STEPS)) for _ in range(REQUESTS - 1)]
        seen = []
        async for chunk in await self._request(STEPS, stream=True):
            seen.append((chunk["meta_info"]["completion_tokens"], time.perf_counter(), scheduler_seconds()))
        await asyncio.gather(*others)
        # The first tokens may come while others are still prefilled. A chunk has several tokens if this process lags.
        seen = [point for point in seen if point[0] >= STEPS // 10]
        (first, begin, used_before), (last, end, used) = seen[0], seen[-1]
        assert last - first > STEPS // 2, f"tokens {first} to {last} of {STEPS}"
        return {
            "step_ms": 1e3 * (end - begin) / (last - first),
            "step_cpu_ms": 1e3 * (used - used_before) / (last - first),
            "longest_ms": 1e3 * max(after[1] - before[1] for before, after in itertools.pairwise(seen)),
        }


def scheduler_seconds() -> float:
    """Processor time of the scheduler's main thread."""
    best = 0.0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        best = max(best, int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) / 1e9)
    return best


def measure(branches: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Medians over all runs, by whether retention is on."""
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    fills: dict[str, list[float]] = {mode: [] for mode in MODES}
    pinning: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for number in range(rounds):
        order = MODES if number % 2 == 0 else MODES[::-1]
        pipes, processes = {}, []
        for mode in order:
            pipes[mode], other = context.Pipe()
            processes.append(context.Process(target=serve, args=(other, branches, mode == "on")))
            processes[-1].start()
            other.close()
            fills[mode].append(pipes[mode].recv())
        for _ in range(repeats):
            for mode in order:
                pipes[mode].send("run")
                runs[mode].append(pipes[mode].recv())
                print(branches, mode, runs[mode][-1], file=sys.stderr, flush=True)
        for mode in order:
            pipes[mode].send("end")
            pinning[mode] = pipes[mode].recv()
        for process in processes:
            process.join()
    row: dict[str, Any] = {"branches": branches}
    for mode in MODES:
        row[mode] = {key: round(statistics.median(run[key] for run in runs[mode]), 3) for key in runs[mode][0]}
        row[mode]["fill_s"] = round(statistics.median(fills[mode]), 1)
        row[mode]["runs_step_cpu_ms"] = [round(run["step_cpu_ms"], 3) for run in runs[mode]]
        row[mode]["runs_step_ms"] = [round(run["step_ms"], 3) for run in runs[mode]]
    row["on"]["counters"] = pinning["on"]
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--rounds", type=int, default=3, help="pairs of servers")
    parser.add_argument("--repeats", type=int, default=5, help="runs of 32 requests on each server")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(argv)
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "repeats": options.repeats, "rows": []}
    for branches in options.branches:
        row = measure(branches, options.rounds, options.repeats)
        results["rows"].append(row)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        for key in ("step_ms", "step_cpu_ms"):
            print(f"{branches} branches, {key}: off {row['off'][key]}, on {row['on'][key]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
