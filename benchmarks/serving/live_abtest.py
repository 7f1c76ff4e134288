"""Live A/B and A/A tests of routing policies on one server under load.

    python -m benchmarks.serving.live_abtest --model MODEL --load-format dummy --context-length 16384 \\
        --server-args "--disable-prefill-cuda-graph --cuda-graph-max-bs-decode 256" --out build/live

For each workload, rollout or conversation: `abtest live` with --arms, then with the second arm twice.
Requests are sent again and again, so the load never ends meanwhile. Writes OUT.json, and OUT-WORKLOAD-ab.html and
-aa.html with their plots. Without --model a tiny model on the CPU is used, to try the command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.provenance import git_commit
from benchmarks.serving.__main__ import model_of
from benchmarks.serving.backends import UsageError
from benchmarks.serving.drawn import Rollout, rollout_requests
from benchmarks.serving.provenance import arguments_of, inherited_environment, machine_name, package_versions
from benchmarks.serving.rollout import CPU_POOL_TOKENS
from benchmarks.serving.workloads import Sizes, make_requests
from sgl_prefix_attn.abtest import live
from sgl_prefix_attn.abtest.client import Client
from sgl_prefix_attn.demo.client import RequestError, Sample, replay
from sgl_prefix_attn.demo.server import Server, ServerError, ServerOptions, serve
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from sgl_prefix_attn.routing.live_plan import LivePlan

WORKLOADS = ("rollout", "conversation")
READY_SECONDS = 600.0  # until decode steps run


class LoadOverError(Exception):
    """The tests have ended; open requests are dropped."""


@contextlib.contextmanager
def load(server: Server, requests_of: Callable[[int], Sequence[Request]]) -> Iterator[list[str]]:
    """Sends the requests of rounds 0, 1, ... until the block ends; two rounds overlap. Yields what went wrong."""
    over, errors = threading.Event(), list[str]()

    def check(request: Request, sample: Sample) -> None:
        if over.is_set():
            raise LoadOverError

    def send(first: int) -> None:
        number = first
        while not over.is_set():
            try:
                replay(server.url, requests_of(number), on_token=check, timeout_seconds=3600.0)
            except LoadOverError:
                return
            except (aiohttp.ClientError, RequestError, TimeoutError, OSError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                return
            number += 2

    threads = [threading.Thread(target=send, args=(first,), daemon=True) for first in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        over.set()
        for thread in threads:
            thread.join(60.0)


def requests_of(workload: str, args: argparse.Namespace, vocabulary: Vocabulary, context: int, number: int) -> Any:
    """The requests of one round."""
    if workload == "rollout":
        sizes = (args.groups, args.samples, args.prompt_tokens, args.output_tokens, context)
        return rollout_requests(Rollout(*sizes, seed=args.seed + number), vocabulary)
    sizes_of = Sizes(requests=args.requests, rate=args.rate, output_tokens=args.output_tokens, seed=args.seed + number)
    return make_requests("conversation", sizes_of, vocabulary, context)


def measure(server: Server, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both tests, under the load that runs."""
    _wait_for_steps(server)
    client, found = Client(server.url), {}
    for name, arms in (("ab", tuple(args.arms)), ("aa", (args.arms[1], args.arms[1]))):
        plan = LivePlan(arms=arms, pairs=args.pairs, block_steps=args.block, warmup_steps=args.warmup, seed=args.seed)
        copies = live.run(client, plan, args.test_seconds)
        out = None if args.out is None else args.out.with_name(f"{args.out.name}-{workload}-{name}")
        found[name] = live.report(copies, args.effect / 100, out).as_json()
    return found


def _wait_for_steps(server: Server) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        state = server.packing_state()
        counters = {} if state is None else state["counters"]
        eligible = counters and (counters["steps_packed"]["decode"] or any(counters["routed_steps"].values()))
        if state is not None and state["route"]["facts"] is not None and eligible:
            return
        time.sleep(0.5)
    raise ServerError(
        f"no decode step could run packed within {READY_SECONDS:g} s; fallbacks: {counters.get('fallbacks', {})}"
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.live_abtest", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    result.add_argument("--model", help="model folder or name (default: a tiny random-weight Llama on the CPU)")
    result.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda with --model, else cpu")
    result.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: both")
    result.add_argument("--arms", nargs=2, default=["batch>=64", "cost"], metavar="POLICY", help="batch>=64 and cost")
    result.add_argument("--pairs", type=int, default=150, metavar="N", help="pairs of blocks of a test (150)")
    result.add_argument("--block", type=int, default=16, metavar="STEPS", help="of a block (16)")
    result.add_argument("--warmup", type=int, default=4, metavar="STEPS", help="of a block, not counted (4)")
    result.add_argument("--effect", type=float, default=1.0, metavar="PERCENT", help="difference to plan for (1)")
    result.add_argument("--test-seconds", type=float, default=150.0, metavar="S", help="most time of a test (150)")
    result.add_argument("--groups", type=int, default=96, metavar="N", help="rollout: prompts of a round (96)")
    result.add_argument("--samples", type=int, default=16, metavar="N", help="rollout: requests of a prompt (16)")
    result.add_argument("--prompt-tokens", type=int, default=4096, metavar="N", help="rollout: median (4096)")
    result.add_argument("--output-tokens", type=int, default=700, metavar="N", help="mean; conversation: most (700)")
    result.add_argument("--requests", type=int, default=500, metavar="N", help="conversation: of a round (500)")
    result.add_argument("--rate", type=float, default=16.0, help="conversation: requests a second of each round (16)")
    result.add_argument("--running", type=int, default=256, metavar="N", help="--max-running-requests (256)")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--context-length", type=int, help="default: the model's")
    result.add_argument("--load-format", default="auto", help="e.g. dummy: random weights, no weight files needed")
    result.add_argument("--server-args", default="", help="more arguments for the server, as one quoted string")
    result.add_argument("--start-seconds", type=float, default=3600.0, help="a start may take (3600)")
    result.add_argument("--logs", type=Path, default=Path("build/serving-logs"), help="folder of the server's logs")
    result.add_argument("--out", type=Path, metavar="OUT", help="write OUT.json and what belongs to it")
    result.add_argument("--commit", default=git_commit(), metavar="SHA", help="commit to record (default: git's)")
    return result


def run(args: argparse.Namespace) -> int:
    model, vocabulary, context = model_of(args)
    device = args.device or ("cuda" if args.model else "cpu")
    extra = ["--load-format", args.load_format, "--max-running-requests", str(args.running)]
    extra += ["--context-length", str(context)] if args.context_length else []
    extra += ["--max-total-tokens", str(CPU_POOL_TOKENS)] if device == "cpu" else []
    extra += ["--stream-interval", "16" if device == "cuda" else "1", *shlex.split(args.server_args)]
    options = ServerOptions(
        model=model, backend="prefixpack", device=device, extra=tuple(extra), start_seconds=args.start_seconds,
        environment={"PREFIXPACK_LIVE_TESTS": "1"}, log_folder=args.logs,
    )  # fmt: skip
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "commit": args.commit, "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": machine_name(), "versions": package_versions(),
        "arguments": arguments_of(args),
        "inherited_environment": inherited_environment(), "tests": {}, "errors": [],
    }  # fmt: skip
    with serve(options) as server:
        for workload in args.workload:
            print(workload, flush=True)

            def round_of(number: int, workload: str = workload) -> Any:
                return requests_of(workload, args, vocabulary, context, number)

            server.flush_cache()
            with load(server, round_of) as errors:
                results["tests"][workload] = measure(server, workload, args)
            results["errors"] += errors
        state = server.packing_state()
        results["route"] = None if state is None else {key: state["route"][key] for key in ("policy", "profile_from")}
    if args.out is not None:
        args.out.with_name(f"{args.out.name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(results["errors"]))
    return 1 if results["errors"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parser().parse_args(argv))
    except (UsageError, ValueError, ServerError) as error:
        print(f"benchmarks.serving.live_abtest: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
