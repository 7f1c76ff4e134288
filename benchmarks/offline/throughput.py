"""Throughput of the batch runner against plain `Engine.generate` in shuffled and in sorted order, at equal tokens out.

    python -m benchmarks.offline.throughput [--out FILE.json] [--settings 500/50x4 1000/100x16] [--repeats 5]

On the CPU engine with the tiny random model; the KV pool holds a tenth of the batch's unique tokens. Seconds are from
the first request to the last answer, engines loaded. In each repeat every way of running gets the same new prompts, one
after the other, beginning with another one each time; the table has medians. CPU seconds are those of all processes
that take part (engine, its helpers, the caller): what to look at on a machine that others use too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.offline.workloads import Setting
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.offline.engines import EngineArguments, EnginePool
from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.progress import Progress
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.runner import BatchOptions, run_batch
from sgl_prefix_attn.offline.tokenize import PromptEncoder
from sgl_prefix_attn.sglang_plugin.offline import engine_process

_BACKENDS = ("torch_native", "prefixpack")
_WAYS = ("Engine.generate, shuffled", "Engine.generate, sorted", "batch runner")
_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
_WARM_UP = [[11 + n] * 50 for n in range(8)]
_Prompts = list[list[int]]


@dataclass(frozen=True)
class Run:
    """One measurement. `outputs`: tokens by prompt."""

    seconds: float
    cpu_seconds: float
    cached_tokens: int
    outputs: dict[str, list[int]]


def server_arguments(backend: str, pool: int) -> tuple[str, ...]:
    return (
        *("--model-path", str(tiny_model()), "--skip-tokenizer-init", "--device", "cpu", "--dtype", "float32"),
        *("--disable-cuda-graph", "--grammar-backend", "none", "--log-level", "error", "--context-length", "4096"),
        *("--max-total-tokens", str(pool), "--attention-backend", backend, "--max-running-requests", "64"),
        "--sleep-on-idle",  # engines that wait for their turn leave the CPU to the others
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
        self._left = 0

    def start(self, total: int, done: int) -> None:
        self._before, self._left = cpu_seconds(), total - done
        super().start(total, done)

    def advance(self, requests: int, prompt_tokens: int, output_tokens: int, saving: float) -> None:
        self._left -= requests
        if self._left == 0:  # to look takes long
            self.spent = cpu_seconds() - self._before


class KeptEngines(EnginePool):
    """Stay for the next batch."""

    def __exit__(self, *exception: object) -> None:
        pass

    def close(self) -> None:
        super().__exit__()


def serve_plain(connection: Connection, arguments: tuple[str, ...]) -> None:
    """In a process of its own: an Engine, and a `Run` for each (prompts, output tokens) until None comes."""
    os.environ.update(_ENVIRONMENT)
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    engine = Engine(server_args=prepare_server_args(list(arguments)))

    def run(prompts: _Prompts, output: int) -> Run:
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        cpu, started = cpu_seconds(), time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        tokens = {str(p): answer["output_ids"] for p, answer in zip(prompts, answers, strict=True)}
        return Run(seconds, cpu, cached, tokens)

    _serve(connection, run)
    engine.shutdown()


def serve_runner(connection: Connection, arguments: tuple[str, ...]) -> None:
    """As `serve_plain`, by the batch runner with its journal and all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        engine = EngineArguments(arguments, tuple(_ENVIRONMENT.items()), folder / "log")
        options = BatchOptions(source, target, folder / "errors", str(tiny_model()), (engine,), ordered=True)
        engines = KeptEngines(engine_process.main, [engine])
        encoder = PromptEncoder(str(tiny_model()))

        def run(prompts: _Prompts, output: int) -> Run:
            body = {"max_tokens": output, "temperature": 0, "ignore_eos": True}
            lines = [
                {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
                for n, prompt in enumerate(prompts)
            ]
            source.write_text("".join(json.dumps(line) + "\n" for line in lines))
            progress = CpuProgress()
            summary = run_batch(options, engine_process.main, encoder.encode, progress, lambda *_: engines)
            answers = [json.loads(text)["response"]["body"]["choices"][0]["token_ids"] for text in target.open()]
            tokens = {str(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
            return Run(summary.seconds, progress.spent, summary.cached_tokens, tokens)

        _serve(connection, run)
        engines.close()


def _serve(connection: Connection, run: Callable[[_Prompts, int], Run]) -> None:
    run(_WARM_UP, 4)
    connection.send(None)  # ready
    while (job := connection.recv()) is not None:
        connection.send(run(*job))


class Side:
    """A process that runs batches one way."""

    def __init__(self, serve: Callable[[Connection, tuple[str, ...]], None], arguments: tuple[str, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, arguments))
        self._process.start()
        theirs.close()
        self._connection.recv()

    def run(self, prompts: _Prompts, output: int) -> Run:
        self._connection.send((prompts, output))
        run = self._connection.recv()
        assert isinstance(run, Run)
        return run

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    pool = max(tree_of(setting, 0).unique_tokens // 10, setting.shared + setting.own + setting.output + 64)
    sides: dict[str, Side] = {}
    for backend in _BACKENDS:
        plain, runner = (Side(serve, server_arguments(backend, pool)) for serve in (serve_plain, serve_runner))
        sides |= {f"{way}, {backend}": runner if way == "batch runner" else plain for way in _WAYS}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    limits, equal = [], dict.fromkeys(sides, 0)
    names = list(sides)
    for repeat in range(repeats):
        prompts = prompts_of(setting, repeat)
        limits.append(tree_of(setting, repeat).saving)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            runs[name].append(sides[name].run(sorted(prompts) if "sorted" in name else prompts, setting.output))
            last = runs[name][-1]
            print(
                f"{setting.name} {repeat}: {name} {last.seconds:.1f} s, CPU {last.cpu_seconds:.1f} s", file=sys.stderr
            )
        reference = runs[names[0]][-1].outputs
        for name in names:
            equal[name] += sum(runs[name][-1].outputs[prompt] == reference[prompt] for prompt in reference)
    for side in set(sides.values()):
        side.close()
    total, out = tree_of(setting, 0).total_tokens, setting.requests * setting.output
    return {
        "requests": setting.requests,
        "repeats": repeats,
        "prompt_tokens": total,
        "output_tokens": out,
        "pool_tokens": pool,
        "limit": round(statistics.median(limits), 4),
        "runs": {
            name: {
                "seconds": [round(run.seconds, 2) for run in done],
                "cpu_seconds": [round(run.cpu_seconds, 2) for run in done],
                "output_tokens_per_second": round(out / statistics.median(run.seconds for run in done), 1),
                "output_tokens_per_cpu_second": round(out / statistics.median(run.cpu_seconds for run in done), 1),
                "saving": round(statistics.median(run.cached_tokens for run in done) / total, 4),
                "equal_outputs": f"{equal[name]} of {setting.requests * repeats}",
            }
            for name, done in runs.items()
        },
    }


def prompts_of(setting: Setting, repeat: int) -> _Prompts:
    prompts = setting.prompts(seed=repeat)
    return [[token % (VOCABULARY - RESERVED_TOKENS) + RESERVED_TOKENS for token in prompt] for prompt in prompts]


def tree_of(setting: Setting, repeat: int) -> PrefixTree:
    return PrefixTree(Prompts.from_lists(prompts_of(setting, repeat)))


def table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | run | output tokens/s | output tokens/CPU s | prompt tokens saved | outputs equal to the first |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for run, values in result["runs"].items():
            lines.append(
                f"| {name} | {run} | {values['output_tokens_per_second']:,.0f} | "
                f"{values['output_tokens_per_cpu_second']:,.0f} | {values['saving']:.3f} of "
                f"{result['limit']:.3f} | {values['equal_outputs']} |"
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for text in args.settings:
        setting = parse(text, args.requests, args.output_tokens)
        results[setting.name] = measure(setting, args.repeats)
    print(table(results))
    if args.out:
        args.out.write_text(json.dumps({"cpus": os.cpu_count(), "workloads": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
