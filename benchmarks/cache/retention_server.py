"""Decode steps of a real CPU server with retention on and off, while its full prefix cache evicts.

    python -m benchmarks.cache.retention_server --out benchmarks/results/retention_server.json

The pool has 56 tokens a branch, and as many prompts of 64 tokens are computed first, so it is full and evicts. Then
32 requests with prompts of 64 tokens decode 150 steps; that is repeated. A step's time is the time between two tokens
of one of them, whose tokens are streamed. Servers with retention on and off alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.serving.host_cost import machine

PROMPT, REQUESTS, STEPS, POOL = 64, 32, 150, 56
VOCABULARY = range(10, 1000)
WAYS = ("off", "on")


def serve(branches: int, retention: bool, repeats: int) -> dict[str, Any]:
    """Starts a server, fills its cache and times the steps."""
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
        grammar_backend="none",
        log_level="error",
    )
    try:
        return engine.loop.run_until_complete(_measure(engine, branches, retention, repeats))
    finally:
        engine.shutdown()


async def _measure(engine: Any, branches: int, retention: bool, repeats: int) -> dict[str, Any]:
    dice = random.Random(branches)

    def prompt() -> list[int]:
        return dice.choices(VOCABULARY, k=PROMPT)

    async def request(tokens: int) -> None:
        await engine.async_generate(input_ids=prompt(), sampling_params=_sampling(tokens))

    started = time.perf_counter()
    for begin in range(0, branches, 256):
        await asyncio.gather(*(request(1) for _ in range(begin, min(begin + 256, branches))))
    fill = time.perf_counter() - started
    means, medians, longest = [], [], []
    for _ in range(repeats):
        others = [asyncio.ensure_future(request(STEPS)) for _ in range(REQUESTS - 1)]
        at = []
        async for _ in await engine.async_generate(input_ids=prompt(), sampling_params=_sampling(STEPS), stream=True):
            at.append(time.perf_counter())
        await asyncio.gather(*others)
        # The first two tokens may come while others are still prefilled.
        gaps = [1e3 * (after - before) for before, after in zip(at[2:], at[3:], strict=False)]
        assert len(gaps) > STEPS // 2, f"{len(at)} streamed tokens of {STEPS}"
        means.append(1e3 * (at[-1] - at[2]) / (STEPS - 3))
        medians.append(statistics.median(gaps))
        longest.append(max(gaps))
    pinning = (await engine.tokenizer_manager.get_internal_state())[0].get("prefixpack_pinning", {})
    assert bool(pinning) == retention and pinning.get("failures", 0) == 0, pinning
    return {"mean_ms": means, "median_ms": medians, "longest_ms": longest, "fill_s": fill}


def _sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def measure(branches: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Medians over all repeats, in milliseconds, by whether retention is on."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            found[way].append(serve(branches, way == "on", repeats))
            print(branches, way, found[way][-1], file=sys.stderr, flush=True)
    row: dict[str, Any] = {"branches": branches}
    for way in WAYS:
        runs = found[way]
        values = {key: [x for run in runs for x in run[key]] for key in ("mean_ms", "median_ms", "longest_ms")}
        row[way] = {key: round(statistics.median(value), 3) for key, value in values.items()}
        row[way]["fill_s"] = round(statistics.median(run["fill_s"] for run in runs), 1)
        row[way]["runs_mean_ms"] = [round(value, 3) for value in values["mean_ms"]]
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--rounds", type=int, default=3, help="servers of each kind")
    parser.add_argument("--repeats", type=int, default=3, help="runs of 32 requests on each server")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(argv)
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "repeats": options.repeats, "rows": []}
    for branches in options.branches:
        row = measure(branches, options.rounds, options.repeats)
        results["rows"].append(row)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        on, off = row["on"], row["off"]
        print(f"{branches} branches: step off {off['mean_ms']} ms, on {on['mean_ms']} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
