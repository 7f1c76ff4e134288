"""Throughput of the batch runner against plain `Engine.generate` in shuffled and in sorted order, at equal tokens out.

    python -m benchmarks.offline.throughput [--out FILE.json] [--settings 500/50x4 1000/100x16] [--repeats 5]
    python -m benchmarks.offline.throughput --device cuda --model FOLDER [--load-format dummy] --out FILE.json

Without --device the CPU engine runs the tiny random model. Seconds are from the first request to the last answer,
engines loaded. In each repeat all runs get the same new prompts; the table has medians. On the CPU all engines are
loaded at once and take turns, beginning with another one each time; CPU seconds are those of all processes that take
part (engine, its helpers, the caller): what to look at on a machine that others use too. On a GPU one engine is loaded
after the other. With --resume, runs that --out already has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.offline.sides import Launch, PromptLists, Run, Side, serve_plain, serve_runner
from benchmarks.offline.workloads import Setting
from benchmarks.provenance import git_commit, machine_name, package_versions
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.prompts import Prompts

_RUNNER = "batch runner"
_PLAIN = ("Engine.generate, shuffled", "Engine.generate, sorted")
_DEFAULTS = {
    "cpu": {"backends": ["torch_native", "prefixpack"], "settings": ["500/50x4", "1000/100x16"], "requests": 192},
    "cuda": {"backends": ["fa3", "flashinfer", "prefixpack"], "settings": ["2000/200x16"], "requests": 512},
}


@dataclass(frozen=True)
class Bench:
    """What runs the batches. `resident`: all engines at once, in turns."""

    model: Path
    vocabulary: int
    common: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    resident: bool

    @classmethod
    def cpu(cls) -> Bench:
        return cls(
            tiny_model(),
            VOCABULARY,
            (
                *("--skip-tokenizer-init", "--device", "cpu", "--dtype", "float32", "--disable-cuda-graph"),
                *("--grammar-backend", "none", "--context-length", "4096", "--max-running-requests", "64"),
                "--sleep-on-idle",  # engines that wait for their turn leave the CPU to the others
            ),
            (("SGLANG_USE_CPU_ENGINE", "1"), ("OMP_NUM_THREADS", "1")),
            resident=True,
        )

    @classmethod
    def gpu(cls, model: Path, load_format: str, server_args: str) -> Bench:
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        common = ("--skip-tokenizer-init", "--load-format", load_format, *server_args.split())
        return cls(model, vocabulary, common, (), resident=False)

    def launch(self, backend: str, pool: int) -> Launch:
        arguments = (
            *("--model-path", str(self.model), *self.common, "--log-level", "error"),
            *("--max-total-tokens", str(pool), "--attention-backend", backend),
        )
        return Launch(arguments, self.environment, str(self.model))


@dataclass(frozen=True)
class Batch:
    """A setting's prompts by repeat, and a pool of a share of the unique tokens."""

    setting: Setting
    share: float
    vocabulary: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}, pool {self.share:g}"

    def prompts(self, repeat: int) -> PromptLists:
        usable = self.vocabulary - RESERVED_TOKENS
        prompts = self.setting.prompts(seed=repeat)
        return [[token % usable + RESERVED_TOKENS for token in prompt] for prompt in prompts]

    def tree(self, repeat: int) -> PrefixTree:
        return PrefixTree(Prompts.from_lists(self.prompts(repeat)))

    def pool(self) -> int:
        """Tokens. A pool of all has room for the outputs too."""
        unique, one = self.tree(0).unique_tokens, self.setting.shared + self.setting.own + self.setting.output + 64
        outputs = self.setting.requests * self.setting.output if self.share >= 1 else 0
        return max(int(unique * self.share) + outputs, one)


def sides_of(bench: Bench, backends: list[str]) -> dict[str, list[str]]:
    """Names of the runs by engine. On the GPU a stock backend has no runner of its own."""
    sides = {}
    for backend in backends:
        if bench.resident or backend != "prefixpack":
            sides[f"plain {backend}"] = [f"{way}, {backend}" for way in _PLAIN]
        if bench.resident or backend == "prefixpack":
            sides[f"runner {backend}"] = [f"{_RUNNER}, {backend}"]
    return sides


def measure(bench: Bench, batch: Batch, backends: list[str], repeats: int, runs: dict[str, list[Run]]) -> None:
    """Fills `runs`, by name, with what it lacks."""
    missing = {
        side: names
        for side, names in sides_of(bench, backends).items()
        if any(len(runs.get(name, ())) < repeats for name in names)
    }
    pool = batch.pool()

    def start(side: str) -> Side:
        kind, _, backend = side.partition(" ")
        return Side(serve_plain if kind == "plain" else serve_runner, bench.launch(backend, pool))

    for together in [list(missing)] if bench.resident else [[side] for side in missing]:
        loaded = {side: start(side) for side in together}
        turns = [(name, loaded[side]) for side in together for name in missing[side]]
        for name, _ in turns:
            runs[name] = []
        for repeat in range(repeats):
            prompts = batch.prompts(repeat)
            first = repeat % max(1, len(turns))
            for name, side in turns[first:] + turns[:first]:
                run = side.run(sorted(prompts) if "sorted" in name else prompts, batch.setting.output)
                runs[name].append(run)
                print(
                    f"{batch.name} {repeat}: {name} {run.seconds:.1f} s, CPU {run.cpu_seconds:.1f} s", file=sys.stderr
                )
        for side in loaded.values():
            side.close()


def summary(batch: Batch, runs: dict[str, list[Run]], repeats: int) -> dict[str, Any]:
    total, out = batch.tree(0).total_tokens, batch.setting.requests * batch.setting.output
    reference = next(iter(runs.values()))

    def equal(done: list[Run]) -> int:
        pairs = zip(done, reference, strict=True)
        return sum(a == b for run, first in pairs for a, b in zip(run.outputs, first.outputs, strict=True))

    return {
        "requests": batch.setting.requests,
        "repeats": repeats,
        "prompt_tokens": total,
        "output_tokens": out,
        "pool_tokens": batch.pool(),
        "limit": round(statistics.median(batch.tree(repeat).saving for repeat in range(repeats)), 4),
        "runs": {
            name: {
                "seconds": [round(run.seconds, 2) for run in done],
                "cpu_seconds": [round(run.cpu_seconds, 2) for run in done],
                "output_tokens_per_second": round(out / statistics.median(run.seconds for run in done), 1),
                "output_tokens_per_cpu_second": round(out / statistics.median(run.cpu_seconds for run in done), 1),
                "saving": round(statistics.median(run.cached_tokens for run in done) / total, 4),
                "equal_outputs": f"{equal(done)} of {batch.setting.requests * repeats}",
                "cached_tokens": [run.cached_tokens for run in done],
                "outputs": [list(run.outputs) for run in done],
            }
            for name, done in runs.items()
        },
    }


def measured(result: dict[str, Any]) -> dict[str, list[Run]]:
    """The runs of an earlier summary()."""
    return {
        name: [
            Run(seconds, cpu, cached, tuple(outputs))
            for seconds, cpu, cached, outputs in zip(
                run["seconds"], run["cpu_seconds"], run["cached_tokens"], run["outputs"], strict=True
            )
        ]
        for name, run in result["runs"].items()
    }


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


def setting_of(text: str, requests: int, output: int) -> Setting:
    """Raises: ValueError, if it is not PREFIX/OWNxDEGREE."""
    try:
        lengths, degree = text.split("x")
        shared, own = lengths.split("/")
        return Setting(int(shared), int(own), int(degree), requests, output)
    except ValueError:
        raise ValueError(f"setting {text!r} is not PREFIX/OWNxDEGREE, such as 2000/200x16") from None


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    result.add_argument("--model", type=Path, help="folder of a model; needed with --device cuda")
    result.add_argument("--load-format", default="dummy", help="of that model (default dummy: random weights)")
    result.add_argument("--server-args", default="", help="more arguments for each engine on a GPU, as one string")
    result.add_argument("--backends", nargs="+", help="default: torch_native and ours; on a GPU fa3, flashinfer, ours")
    result.add_argument("--settings", nargs="+", help="prefix/own x degree (500/50x4 1000/100x16; GPU: 2000/200x16)")
    result.add_argument("--requests", type=int, help="of a batch (192; GPU: 512)")
    result.add_argument("--output-tokens", type=int, default=32, help="of a request (32)")
    result.add_argument("--pool", type=float, nargs="+", default=[0.1], help="KV pools, of the unique tokens (0.1)")
    result.add_argument("--repeats", type=int, default=5, help="default 5")
    result.add_argument("--out", type=Path, help="JSON file of results, written after each workload")
    result.add_argument("--resume", action="store_true", help="keep the runs that --out already has")
    result.add_argument("--commit", default=git_commit(), metavar="SHA", help="commit to record (default: git's)")
    return result


def main() -> int:
    args = parser().parse_args()
    if (args.device == "cuda") != (args.model is not None):
        parser().error("--device cuda and --model belong together")
    defaults = _DEFAULTS[args.device]
    requests, backends = args.requests or defaults["requests"], args.backends or defaults["backends"]
    try:
        settings = [setting_of(text, requests, args.output_tokens) for text in args.settings or defaults["settings"]]
        bench = Bench.gpu(args.model, args.load_format, args.server_args) if args.model else Bench.cpu()
    except (OSError, ValueError, KeyError) as error:
        parser().error(str(error))
    results: dict[str, Any] = {}
    if args.resume and args.out and args.out.exists():
        results = json.loads(args.out.read_text())["workloads"]
    for batch in (Batch(setting, share, bench.vocabulary) for setting in settings for share in args.pool):
        runs = measured(results[batch.name]) if batch.name in results else {}
        for backend in [backends] if bench.resident else [[one] for one in backends]:
            measure(bench, batch, backend, args.repeats, runs)
            results[batch.name] = summary(batch, runs, args.repeats)
            if args.out:
                write(args.out, results, args)
    print(table(results))
    return 0


def write(path: Path, results: dict[str, Any], args: argparse.Namespace) -> None:
    origin = {"machine": machine_name(), "cpus": os.cpu_count(), "versions": package_versions(), "commit": args.commit}
    origin["arguments"] = {name: str(value) for name, value in vars(args).items() if name not in ("model", "out")}
    path.write_text(json.dumps({**origin, "workloads": results}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
