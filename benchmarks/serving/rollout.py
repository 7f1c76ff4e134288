"""Rollout as RL launchers send it: every sample a request of its own, outputs of different lengths, refilled.

    python -m benchmarks.serving.rollout --model PATH --load-format dummy --backends prefixpack,fa3,flashinfer \\
        --prompt-tokens 1024 4096 16384 --out build/rollout.json

Groups of --samples requests share a prompt. Prompt lengths are log-normal around --prompt-tokens (sigma 0.3), output
lengths exponential with mean --output-tokens. --workload has others (`drawn`). More requests wait than --running
allows, so the server refills. Each of --seeds draws is sent to each server, after a warm-up and with an empty cache.

Reported are output tokens per second of the whole run, from the first request to the last answer, and of its steady
state: from when as many samples have ended as the server runs at a time until that many are left. With --window S a run
ends after S seconds of the steady state. Beside them: decode step time by number of running requests, the share of time
in gaps with a prefill step, how often the prompt of a group was computed, tokens a request and step (more than 1 with
speculation), decode steps by route, fallbacks by reason, and about how long each took: /server_info is read every two
seconds, and the seconds between are shared out by steps. The file is rewritten after every run; --resume skips what it
has. A backend with +mixed behind it has mixed chunk: 'prefixpack+mixed,fa3,fa3+mixed'. Without --model a tiny model on
the CPU is used, to try the command.

Speculation over random weights accepts nothing. SGLANG_SIMULATE_ACC_LEN=2.5 makes SGLang accept that many a step:

    SGLANG_SIMULATE_ACC_LEN=2.5 python -m benchmarks.serving.rollout --backends 'prefixpack[pack_verify=1],fa3' ... \\
        --server-args "--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT \\
        --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.provenance import arguments_of, git_commit, inherited_environment, machine_name, package_versions
from benchmarks.serving.__main__ import model_of
from benchmarks.serving.backends import OURS, Backend, UsageError, parse_backends
from benchmarks.serving.drawn import WORKLOADS, Rollout, drawn_requests
from benchmarks.serving.rollout_run import measure
from benchmarks.serving.step_log import LOG_ARGUMENTS, LOG_ENVIRONMENT
from sgl_prefix_attn.abtest.judge import table_lines
from sgl_prefix_attn.demo.client import RequestError
from sgl_prefix_attn.demo.server import ServerError, ServerOptions, serve
from sgl_prefix_attn.demo.workload import Request, Vocabulary

Arguments = Sequence[str] | None
CPU_POOL_TOKENS = 16384
MEASURES = ("whole_tokens_per_second", "tokens_per_second")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.rollout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--backends", metavar="A,B,...", help="prefixpack,fa3,flashinfer; CPU: prefixpack,torch_native")
    result.add_argument("--output-tokens", type=int, default=700, metavar="N", help="mean (700)")
    result.add_argument("--groups", type=int, default=256, metavar="N", help="prompts (256)")
    result.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["rollout"], help="default: rollout")
    result.add_argument("--seeds", type=int, default=1, metavar="N", help="draws that each server gets (1)")
    result.add_argument(
        "--reasoning-tokens", type=int, default=6144, metavar="N", help="mean output of reasoning (6144)"
    )
    result.add_argument("--window", type=float, metavar="S", help="end a run after S seconds of its steady state")
    result.add_argument("--limit", type=float, default=180.0, metavar="S", help="seconds a run may take (180)")
    result.add_argument(
        "--seconds", type=float, default=570.0, metavar="S", help="start no server later than this (570)"
    )
    add_common_arguments(result)
    return result


def add_common_arguments(result: argparse.ArgumentParser) -> None:
    """Arguments of all benchmarks whose requests are those of `rollout_requests`."""
    result.add_argument("--model", help="model folder or name (default: a tiny random-weight Llama on the CPU)")
    result.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda with --model, else cpu")
    result.add_argument("--prompt-tokens", type=int, nargs="+", default=[1024], metavar="N", help="median (1024)")
    result.add_argument("--samples", type=int, default=16, metavar="N", help="requests per prompt (16)")
    result.add_argument("--running", type=int, default=256, metavar="N", help="--max-running-requests (256)")
    result.add_argument("--seed", type=int, help="default: drawn from the system and recorded")
    result.add_argument("--context-length", type=int, help="default: the model's")
    result.add_argument("--load-format", default="auto", help="e.g. dummy: random weights, no weight files needed")
    result.add_argument("--server-args", default="", help="more arguments for every server, as one quoted string")
    result.add_argument("--start-seconds", type=float, default=3600.0, help="a start may take (3600)")
    result.add_argument("--logs", type=Path, default=Path("build/serving-logs"), help="folder of the servers' logs")
    result.add_argument("--out", type=Path, help="JSON file of results")
    result.add_argument(
        "--resume", action="store_true", help="keep the runs and the seed of --out and add what is missing"
    )
    result.add_argument("--commit", default=git_commit(), metavar="SHA", help="commit to record (default: git's)")


def server_options(args: argparse.Namespace, model: str, backend: Backend) -> ServerOptions:
    device = args.device or ("cuda" if args.model else "cpu")
    extra = ["--load-format", args.load_format, "--max-running-requests", str(args.running), *LOG_ARGUMENTS]
    if args.context_length:
        extra += ["--context-length", str(args.context_length)]
    if device == "cpu":
        extra += ["--max-total-tokens", str(CPU_POOL_TOKENS)]
    extra += ["--stream-interval", "16" if device == "cuda" else "1"]
    return ServerOptions(
        model=model, backend=backend.name, device=device,
        extra=(*extra, *backend.arguments, *shlex.split(args.server_args)),
        environment={**backend.environment, **LOG_ENVIRONMENT}, start_seconds=args.start_seconds,
        log_folder=args.logs,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    args.backends = args.backends or ("prefixpack,fa3,flashinfer" if args.model else "prefixpack,torch_native")
    backends = parse_backends(args.backends, "--backends")
    model, vocabulary, context = model_of(args)
    longest = max(args.prompt_tokens)
    if longest > context // 2:  # where prompts are cut: most would have another length
        least = f"prompts of {longest} tokens need a context of {2 * longest} at least"
        raise UsageError(f"{least}, not {context}; raise --context-length")
    results = opened(args)
    deadline = time.monotonic() + args.seconds
    draws = [
        {"seed": seed, "workload": workload, "prompt_tokens": tokens}
        for seed in range(results["seed"], results["seed"] + args.seeds)
        for workload in args.workload
        for tokens in (args.prompt_tokens if workload == "rollout" else [None])
    ]
    for name, backend in backends.items():
        left = [draw for draw in draws if not has_run(results, backend=name, **draw)]
        if not left or time.monotonic() > deadline:
            continue
        print(f"{name}: starting the server", file=sys.stderr, flush=True)
        try:
            with serve(server_options(args, model, backend)) as server:
                for draw in left:
                    if time.monotonic() > deadline:
                        break
                    row = measure(server, requests_of(draw, args, vocabulary, context), args.running, args)
                    results["runs"].append({"backend": name, **draw, **row})
                    write(args.out, results)
                    speeds = f"{row['whole_tokens_per_second']} tokens/s whole, {row['tokens_per_second']} steady"
                    print(f"{name}, {title_of(draw)}: {speeds}, {row['seconds']} s", file=sys.stderr, flush=True)
        except (ServerError, RequestError, aiohttp.ClientError, TimeoutError) as error:
            results["failures"][name] = f"{type(error).__name__}: {error}"
            write(args.out, results)
            print(f"{name}: {error}", file=sys.stderr)
    print(table(results))
    missing = [(name, draw) for name in backends for draw in draws if not has_run(results, backend=name, **draw)]
    if missing:
        print(f"{len(missing)} runs are missing; go on with --resume", file=sys.stderr)
    return 1 if missing else 0


def requests_of(draw: dict[str, Any], args: argparse.Namespace, vocabulary: Vocabulary, context: int) -> list[Request]:
    output = args.reasoning_tokens if draw["workload"] == "reasoning" else args.output_tokens
    prompt = draw["prompt_tokens"] or 0
    sizes = Rollout(args.groups, args.samples, prompt, output, context, draw["seed"])
    return drawn_requests(draw["workload"], sizes, vocabulary)


def title_of(row: dict[str, Any]) -> str:
    workload = row.get("workload", "rollout")
    return f"{workload} of {row['prompt_tokens']}" if row["prompt_tokens"] else workload


def opened(args: argparse.Namespace) -> dict[str, Any]:
    if args.resume and args.out is not None and args.out.exists():
        found: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8"))
        found["failures"] = {}
        for row in found["runs"]:  # rows of before there were several seeds
            for name, value in (("seed", found["seed"]), ("workload", "rollout"), ("whole_tokens_per_second", None)):
                row.setdefault(name, value)
        return found
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    return {
        "commit": args.commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": machine_name(),
        "versions": package_versions(),
        "arguments": arguments_of(args),
        "inherited_environment": inherited_environment(),
        "seed": seed,
        "runs": [],
        "failures": {},
    }


def has_run(results: dict[str, Any], **fields: Any) -> bool:
    return any(all(row[name] == value for name, value in fields.items()) for row in results["runs"])


def write(path: Path | None, results: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def table(results: dict[str, Any]) -> str:
    """Medians over the seeds, with the lowest and highest; ratios are of the same seed."""
    columns = ("workload", "backend", "tokens/s", "of the best stock", "steady", "of the best stock", "stock steps")
    lines = [columns]
    for title in dict.fromkeys(map(title_of, results["runs"])):
        runs = [row for row in results["runs"] if title_of(row) == title]
        for name in dict.fromkeys(row["backend"] for row in runs):
            own = [row for row in runs if row["backend"] == name]
            routed = Counter[str]()
            for row in own:
                routed.update(row["routed_steps"])
            cells = [cell for measure in MEASURES for cell in cells_of(measure, own, runs)]
            stock = f"{routed['stock']} of {sum(routed.values())}" if routed else ""
            lines.append((title, name, *cells, stock))
    return "\n".join(table_lines(lines)) if len(lines) > 1 else "nothing was measured"


def cells_of(measure: str, own: list[dict[str, Any]], runs: list[dict[str, Any]]) -> tuple[str, str]:
    """Speed of a backend's runs, and how many times the best stock backend's of the same seed it is."""
    speeds, ratios = [], []
    for row in own:
        if (speed := row[measure]) is None:
            continue
        speeds.append(speed)
        stock = [
            other[measure]
            for other in runs
            if other["seed"] == row["seed"] and not other["backend"].startswith(OURS) and other[measure]
        ]
        if stock:
            ratios.append(speed / max(stock))
    return ranged(speeds, "{:.0f}"), ranged(ratios, "{:.2f}")


def ranged(values: Sequence[float], form: str) -> str:
    """Median and range."""
    if len(values) < 2:
        return form.format(*values) if values else ""
    middle, low, high = (form.format(of(values)) for of in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


def exit_status(command: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: Arguments) -> int:
    """Runs a command; wrong arguments are a message and status 2."""
    args = command.parse_args(argv)
    try:
        return run(args)
    except (UsageError, ValueError) as error:
        print(f"{command.prog.removeprefix('python -m ')}: {error}", file=sys.stderr)
        return 2


def main(argv: Arguments = None) -> int:
    return exit_status(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
