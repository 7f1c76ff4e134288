"""The start of a rollout: all samples of all prompts arrive at once, each a request of its own.

    python -m benchmarks.serving.rollout_start --model PATH --load-format dummy \\
        --backends 'prefixpack,prefixpack[shared_prefill=0],fa3' --prompt-tokens 1024 4096 --out build/start.json

Prompts and outputs are drawn as those of `benchmarks.serving.rollout`. Reported are how often a prompt was computed
(1 at best), the time to the first token, the seconds until all have theirs and until the end, output tokens per second,
and how many samples have the tokens of the first backend that the same command ran. Times are seconds. Each of --times
runs has an empty cache; rows are medians. The file is rewritten after every server; --resume skips what it has. Without
--model a tiny model on the CPU is used.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchmarks.serving.__main__ import model_of
from benchmarks.serving.backends import parse_backends
from benchmarks.serving.rollout import (
    Arguments,
    Rollout,
    add_common_arguments,
    exit_status,
    has_run,
    opened,
    rollout_requests,
    server_options,
    write,
)
from benchmarks.serving.step_log import read_steps
from sgl_prefix_attn.calibration.report import table_lines
from sgl_prefix_attn.demo.client import RequestError, replay
from sgl_prefix_attn.demo.server import Server, ServerError, serve
from sgl_prefix_attn.demo.workload import Request

Tokens = list[list[int]]


def measure(server: Server, requests: Sequence[Request], times: int, limit: float) -> tuple[dict[str, Any], Tokens]:
    """Medians of some runs on one server, and the tokens of the last one."""
    distinct = sum(len(prompt) for prompt in {request.prompt for request in requests})
    runs: list[dict[str, float]] = []
    tokens: Tokens = []
    for _ in range(times):
        server.flush_cache()
        begun, wall = time.perf_counter(), time.time()
        answers = replay(server.url, requests, timeout_seconds=limit)
        seconds = time.perf_counter() - begun
        samples = [sample for answer in answers for sample in answer.samples]
        tokens = [sample.tokens for sample in samples]
        computed = sum(len(a.request.prompt) - s.cached_tokens for a in answers for s in a.samples)
        first = sorted(sample.first for sample in samples)
        steps = read_steps(server.log_text().splitlines())
        runs.append({
            "prompts_computed": computed / distinct, "ttft_p50": statistics.median(first),
            "last_first_token": first[-1], "seconds": seconds, "tokens_per_second": sum(map(len, tokens)) / seconds,
            "prefill_steps": sum(step.prefills for step in steps if step.end >= wall),
        })  # fmt: skip
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    return {"requests": len(requests), "distinct_prompt_tokens": distinct, **medians, "times": times}, tokens


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.rollout_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--backends", default="prefixpack,prefixpack[shared_prefill=0]", metavar="A,B,...")
    result.add_argument("--output-tokens", type=int, default=64, metavar="N", help="mean (64)")
    result.add_argument("--groups", type=int, default=16, metavar="N", help="prompts (16)")
    result.add_argument("--times", type=int, default=3, metavar="N", help="runs of each, with an empty cache (3)")
    result.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds a run may take (300)")
    add_common_arguments(result)
    return result


def run(args: argparse.Namespace) -> int:
    backends = parse_backends(args.backends, "--backends")
    model, vocabulary, context = model_of(args)
    results = opened(args)
    reference: dict[int, Tokens] = {}
    for name, backend in backends.items():
        left = [n for n in args.prompt_tokens if not has_run(results, name, n)]
        if not left:
            continue
        print(f"{name}: starting the server", file=sys.stderr, flush=True)
        try:
            with serve(server_options(args, model, backend)) as server:
                for count in left:
                    sizes = Rollout(args.groups, args.samples, count, args.output_tokens, context, results["seed"])
                    row, tokens = measure(server, rollout_requests(sizes, vocabulary), args.times, args.limit)
                    first = reference.setdefault(count, tokens)
                    same = sum(mine == other for mine, other in zip(tokens, first, strict=True))
                    row |= {"same_tokens": same} if first is not tokens else {}
                    results["runs"].append({"backend": name, "prompt_tokens": count, **row})
                    write(args.out, results)
        except (ServerError, RequestError, aiohttp.ClientError, TimeoutError) as error:
            results["failures"][name] = f"{type(error).__name__}: {error}"
            write(args.out, results)
            print(f"{name}: {error}", file=sys.stderr)
    print(table(results))
    return 1 if results["failures"] else 0


def table(results: dict[str, Any]) -> str:
    columns = ("prompt", "backend", "computed", "TTFT p50", "last first token", "seconds", "tokens/s", "same tokens")
    rows = [columns]
    for row in sorted(results["runs"], key=lambda row: row["prompt_tokens"]):
        same = row.get("same_tokens")
        rows.append((
            str(row["prompt_tokens"]), row["backend"], f"{row['prompts_computed']:.2f}", f"{row['ttft_p50']:.2f} s",
            f"{row['last_first_token']:.2f} s", f"{row['seconds']:.1f}", f"{row['tokens_per_second']:.0f}",
            "" if same is None else f"{same} of {row['requests']}",
        ))  # fmt: skip
    return "\n".join(table_lines(rows)) if len(rows) > 1 else "nothing was measured"


def main(argv: Arguments = None) -> int:
    return exit_status(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
