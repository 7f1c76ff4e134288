"""Throughput of the batch runner against plain `Engine.generate` in shuffled and in sorted order, at equal tokens out.

    python -m benchmarks.offline.throughput [--out FILE.json] [--settings 500/50x4 1000/100x16] [--requests 192]

On the CPU engine with the tiny random model; the KV pool holds a tenth of the batch's unique tokens. Seconds are from
the first request to the last answer, engines loaded. Each engine runs alone, its runs one after the other. CPU seconds
are those of all processes that take part (engine, its helpers, the caller): what to look at on a machine that others
use too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.offline.workloads import Setting
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.offline.engines import EngineArguments
from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.progress import Progress
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.runner import BatchOptions, run_batch
from sgl_prefix_attn.offline.tokenize import PromptEncoder
from sgl_prefix_attn.sglang_plugin import offline_engine

_BACKENDS = ("torch_native", "prefixpack")
_Run = tuple[float, float, int, dict[str, list[int]]]  # seconds, CPU seconds, cached tokens, output tokens by prompt
_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


def server_arguments(backend: str, pool: int) -> tuple[str, ...]:
    return (
        *("--model-path", str(tiny_model()), "--skip-tokenizer-init", "--device", "cpu", "--dtype", "float32"),
        *("--disable-cuda-graph", "--grammar-backend", "none", "--log-level", "error", "--context-length", "4096"),
        *("--max-total-tokens", str(pool), "--attention-backend", backend, "--max-running-requests", "64"),
    )


def cpu_seconds() -> float:
    """CPU time of this process and all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class CpuProgress(Progress):
    """Shows nothing, and notes the CPU time of a batch from its first request to its last answer."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.spent = self._before = 0.0

    def start(self, total: int, done: int) -> None:
        self._before = cpu_seconds()
        super().start(total, done)

    def advance(self, requests: int, prompt_tokens: int, output_tokens: int, saving: float) -> None:
        self.spent = cpu_seconds() - self._before


def plain(connection: Connection, arguments: tuple[str, ...], orders: dict[str, list[list[int]]], output: int) -> None:
    """In a process of its own: one engine, `generate` for each order; sends {order: measurement}."""
    os.environ.update(_ENVIRONMENT)
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    engine = Engine(server_args=prepare_server_args(list(arguments)))
    sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
    engine.generate(input_ids=[[11] * 50], sampling_params=sampling)
    results = {}
    for name, prompts in orders.items():
        engine.flush_cache()
        cpu, started = cpu_seconds(), time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        tokens = {str(p): answer["output_ids"] for p, answer in zip(prompts, answers, strict=True)}
        results[name] = (seconds, cpu, cached, tokens)
    connection.send(results)
    engine.shutdown()


def run_plain(backend: str, pool: int, prompts: list[list[int]], output: int) -> dict[str, _Run]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    orders = {"shuffled": prompts, "sorted": sorted(prompts)}
    process = context.Process(target=plain, args=(theirs, server_arguments(backend, pool), orders, output))
    process.start()
    theirs.close()
    results = ours.recv()
    process.join()
    return dict(results)


def run_ours(backend: str, pool: int, prompts: list[list[int]], output: int) -> _Run:
    """The batch runner, with its journal and all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        body = {"max_tokens": output, "temperature": 0, "ignore_eos": True}
        lines = [
            {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
            for n, prompt in enumerate(prompts)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        arguments = EngineArguments(server_arguments(backend, pool), tuple(_ENVIRONMENT.items()), folder / "log")
        options = BatchOptions(source, target, folder / "errors", str(tiny_model()), (arguments,), ordered=True)
        progress = CpuProgress()
        summary = run_batch(options, offline_engine.main, PromptEncoder(str(tiny_model())).encode, progress)
        answers = [json.loads(text)["response"]["body"]["choices"][0]["token_ids"] for text in target.open()]
        tokens = {str(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        return summary.seconds, progress.spent, summary.cached_tokens, tokens


def measure(setting: Setting) -> dict[str, Any]:
    prompts = [[token % (VOCABULARY - RESERVED_TOKENS) + RESERVED_TOKENS for token in p] for p in setting.prompts()]
    tree = PrefixTree(Prompts.from_lists(prompts))
    pool = max(tree.unique_tokens // 10, setting.shared + setting.own + setting.output + 64)
    runs: dict[str, _Run] = {}
    for backend in _BACKENDS:
        for order, result in run_plain(backend, pool, prompts, setting.output).items():
            runs[f"Engine.generate, {order}, {backend}"] = result
        runs[f"batch runner, {backend}"] = run_ours(backend, pool, prompts, setting.output)
        print(
            setting.name,
            {name: (round(run[0], 1), round(run[1], 1)) for name, run in runs.items()},
            file=sys.stderr,
            flush=True,
        )
    total, out = tree.total_tokens, len(prompts) * setting.output
    reference = next(iter(runs.values()))[3]
    return {
        "requests": len(prompts),
        "prompt_tokens": total,
        "output_tokens": out,
        "pool_tokens": pool,
        "limit": round(tree.saving, 4),
        "runs": {
            name: {
                "seconds": round(seconds, 2),
                "cpu_seconds": round(cpu, 2),
                "output_tokens_per_second": round(out / seconds, 1),
                "saving": round(cached / total, 4),
                "equal_outputs": sum(tokens[prompt] == reference[prompt] for prompt in reference),
            }
            for name, (seconds, cpu, cached, tokens) in runs.items()
        },
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | run | output tokens/s | prompt tokens saved | outputs equal to the first |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for run, values in result["runs"].items():
            lines.append(
                f"| {name} | {run} | {values['output_tokens_per_second']:,.0f} | "
                f"{values['cpu_seconds']:.1f} | {values['saving']:.3f} of "
                f"{result['limit']:.3f} | {values['equal_outputs']} of {result['requests']} |"
            )
    return "\n".join(lines)


def parse(text: str, requests: int, output: int) -> Setting:
    lengths, _, degree = text.partition("x")
    shared, _, own = lengths.partition("/")
    return Setting(int(shared), int(own), int(degree), requests, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["500/50x4", "1000/100x16"], help="prefix/own x degree")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for text in args.settings:
        setting = parse(text, args.requests, args.output_tokens)
        results[setting.name] = measure(setting)
    print(table(results))
    if args.out:
        args.out.write_text(json.dumps({"cpus": os.cpu_count(), "workloads": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
