"""The real SGLang server on several attention backends in turn, each with the same requests.

    python -m benchmarks.serving --model PATH --load-format dummy --backends prefixpack,flashinfer,fa3,triton \\
        --workload rl --out build/serving_rl.json

An A/B test of two settings of prefixpack is written as if these were backends:

    --backends prefixpack[route=packed],prefixpack[route=batch>=64],flashinfer

Every backend gets a server of its own, that is stopped again whatever happens; its log is kept. Requests are token
ids, streamed, greedy and of fixed length. Reported are time to first token, time per output token (of each sequence
and, as `steady`, only from the moment on at which all sequences had begun, so without prefills), throughput, the KV
reads that prefixpack saved by its own count, and how many sequences have the same tokens as those of the first run.
Two runs of one stock backend differ too, as batches do not form alike: --repeat states by how much. Weights made by
--load-format dummy answer almost independently of the prompt, so equal tokens prove little with them
(`distinct_tokens` of a run shows it); `python -m benchmarks.serving.random_model` writes a model that is good for both.
Latencies of single runs differ by some percent: of backends that ran a workload several times, one after the other on
one server, medians are reported too.

With --tp N, servers have N ranks, and runs of prefixpack say whether all ranks counted the same plans and reads.

The file is rewritten after every run. Without --model a tiny model on the CPU is used, to try the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp

from benchmarks.provenance import (
    arguments_of,
    git_commit,
    inherited_environment,
    machine_name,
    package_versions,
    without_folders,
)
from benchmarks.serving.backends import Backend, UsageError, parse_backends
from benchmarks.serving.measure import run_once, warm_up
from benchmarks.serving.ranks import METRICS_OF_ALL_RANKS, read_ranks
from benchmarks.serving.report import Report
from benchmarks.serving.workloads import WORKLOADS, Sizes, make_requests
from sgl_prefix_attn.demo.client import RequestError
from sgl_prefix_attn.demo.server import ServerError, ServerOptions, serve
from sgl_prefix_attn.demo.workload import TRACE_SLICE, Request, Vocabulary
from sgl_prefix_attn.trace import TraceError

CPU_POOL_TOKENS = 16384
Workloads = dict[str, list[Request]]


# Workloads whose number of groups is what a user counts; of the others it is requests.
COUNTED = {"rl": "groups", "shared-prefix": "groups"}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", help="model folder or name (default: a tiny random-weight Llama on the CPU)")
    result.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda with --model, else cpu")
    result.add_argument(
        "--backends",
        default="prefixpack,flashinfer,fa3,triton",
        metavar="A,B,...",
        help="attention backends in this order, prefixpack perhaps with settings in brackets; the first is what the "
        "others' tokens are compared with",
    )
    result.add_argument("--repeat", default="", metavar="A,B", help="backends that run each workload --times times")
    result.add_argument("--times", type=int, default=2, metavar="N", help="runs by those of --repeat, 2 or more (2)")
    result.add_argument(
        "--workload",
        nargs="+",
        default=["rl"],
        metavar="NAME[:N]",
        help=f"one after the other (rl): {', '.join(WORKLOADS)}; N: requests; groups of rl and shared-prefix",
    )
    sizes = result.add_argument_group("size of the workload (defaults as published, see workloads.py)")
    sizes.add_argument("--groups", type=int, help="rl: prompts; shared-prefix: system prompts (64)")
    sizes.add_argument("--samples", type=int, help="rl: continuations; shared-prefix: requests of a group (16)")
    sizes.add_argument(
        "--prompt-tokens",
        type=int,
        help="rl (4096), no-sharing (2048): of a prompt; shared-prefix: of a system one (2048)",
    )
    sizes.add_argument("--output-tokens", type=int, help="generated (256); conversation, mooncake: the most")
    sizes.add_argument("--requests", type=int, help="no-sharing (256), conversation (500), mooncake (200)")
    sizes.add_argument(
        "--rate",
        type=float,
        help="requests a second (conversation: 8; mooncake: as recorded; else all at once)",
    )
    sizes.add_argument("--trace", type=Path, default=TRACE_SLICE, help="mooncake: trace file (default: shipped slice)")
    sizes.add_argument("--seed", type=int, default=0)
    servers = result.add_argument_group("servers")
    servers.add_argument("--context-length", type=int, help="default: the model's")
    servers.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism (1)")
    servers.add_argument("--load-format", default="auto", help="e.g. dummy: random weights, no weight files needed")
    servers.add_argument("--server-args", default="", help="more arguments for every server, as one quoted string")
    servers.add_argument("--stream-interval", type=int, help="tokens between events of a stream (16 on cuda, else 1)")
    servers.add_argument("--start-seconds", type=float, default=3600.0, help="a start may take (3600)")
    servers.add_argument("--logs", type=Path, default=Path("build/serving-logs"), help="folder of the servers' logs")
    result.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="start no server that would likely not be done within this time (3600)",
    )
    result.add_argument("--out", type=Path, help="JSON file of results")
    result.add_argument("--commit", default=git_commit(), metavar="SHA", help="commit to record (default: git's)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        return run(args)
    except (UsageError, TraceError, ValueError) as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)


def leave(number: int, frame: FrameType | None) -> None:
    # An exception stops the servers on the way out.
    raise SystemExit(128 + number)


def run(args: argparse.Namespace) -> int:
    if args.tp < 1:
        raise UsageError(f"--tp {args.tp}: expected a number of ranks, 1 or more")
    if args.times < 2:
        raise UsageError(f"--times {args.times}: expected 2 or more runs by the backends of --repeat")
    backends = parse_backends(args.backends, "--backends")
    repeated = parse_backends(args.repeat, "--repeat") if args.repeat else {}
    unknown = [name for name in repeated if name not in backends]
    if unknown:
        raise UsageError(f"--repeat {','.join(unknown)}: not among --backends {args.backends}")
    model, vocabulary, context = model_of(args)
    sizes = sizes_of(args)
    workloads = {name: make_requests(*sized(name, sizes), vocabulary, context) for name in args.workload}
    servers = {name: server_options(args, model, context, backend) for name, backend in backends.items()}
    report = Report(args.out, header_of(args, servers, workloads))
    deadline = time.monotonic() + args.seconds
    longest = 0.0
    for backend, options in servers.items():
        begun = time.monotonic()
        if begun + longest > deadline:
            report.fail(backend, f"not started: {deadline - begun:.0f} s are left and the longest took {longest:.0f} s")
            continue
        labels = [label_of(backend, run) for run in range(args.times if backend in repeated else 1)]
        try:
            measure_backend(backend, options, labels, workloads, report, deadline)
        except (ServerError, RequestError, aiohttp.ClientError, TimeoutError) as error:
            report.fail(backend, f"{type(error).__name__}: {error}")
            print(f"{backend}: {error}", file=sys.stderr)
        longest = max(longest, time.monotonic() - begun)
    report.write()
    print(report.table() if report.runs else "nothing was measured")
    return 1 if report.failures else 0


def measure_backend(
    name: str, options: ServerOptions, labels: list[str], workloads: Workloads, report: Report, deadline: float
) -> None:
    """All runs of one server. Raises as the server and the client do; runs that were finished are in the report."""
    begun = time.monotonic()
    print(f"{name}: starting the server", file=sys.stderr, flush=True)
    with serve(options) as server:
        ready = time.monotonic() - begun
        print(f"{name}: ready after {ready:.0f} s", file=sys.stderr, flush=True)
        for workload, requests in workloads.items():
            warm_up(server, requests)
            for label in labels:
                left = max(1.0, deadline - time.monotonic())
                result = run_once(server, workload, label, requests, timeout_seconds=left)
                report.add(result, name, {"start_seconds": round(ready, 1), "log": str(server.log)})
                report.add_ranks(read_ranks(server))
                print(f"{label}: {workload} took {result.seconds:.1f} s", file=sys.stderr, flush=True)


def label_of(backend: str, run: int) -> str:
    """What the n-th run of a backend is called, from 0 on."""
    return backend if run == 0 else f"{backend} again" if run == 1 else f"{backend} again {run}"


def sizes_of(args: argparse.Namespace) -> Sizes:
    return Sizes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)})


def sized(text: str, sizes: Sizes) -> tuple[str, Sizes]:
    """Name and sizes of a workload as the user wrote it: NAME or NAME:N."""
    name, colon, count = text.partition(":")
    if name not in WORKLOADS or (colon and not count.isdecimal()):
        raise UsageError(f"--workload {text}: expected one of {', '.join(WORKLOADS)}, perhaps with :N behind it")
    if not colon:
        return name, sizes
    return name, dataclasses.replace(sizes, **{COUNTED.get(name, "requests"): int(count)})


def model_of(args: argparse.Namespace) -> tuple[str, Vocabulary, int]:
    """Model, token ids for prompts, and tokens a request may have."""
    if args.model is None:
        from sgl_prefix_attn.demo.tiny_model import CONTEXT_LENGTH, RESERVED_TOKENS, VOCABULARY, tiny_model

        if args.device == "cuda":
            raise UsageError("--device cuda needs --model")
        return str(tiny_model()), Vocabulary(RESERVED_TOKENS, VOCABULARY), args.context_length or CONTEXT_LENGTH
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(args.model).get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {args.model}: {error}") from error
    size = config.vocab_size
    # Special tokens sit at the ends of a vocabulary; random ids from the middle are text to any model.
    return args.model, Vocabulary(size // 8, size - size // 8), args.context_length or config.max_position_embeddings


def server_options(args: argparse.Namespace, model: str, context: int, backend: Backend) -> ServerOptions:
    device = args.device or ("cuda" if args.model else "cpu")
    extra = ["--load-format", args.load_format]
    if args.tp > 1:
        extra += ["--tp-size", str(args.tp), *METRICS_OF_ALL_RANKS]
    if args.context_length:
        extra += ["--context-length", str(context)]
    if device == "cpu":
        extra += ["--max-total-tokens", str(CPU_POOL_TOKENS)]
    extra += ["--stream-interval", str(args.stream_interval or (16 if device == "cuda" else 1))]
    return ServerOptions(
        model=model, backend=backend.name, device=device,
        extra=(*extra, *backend.arguments, *shlex.split(args.server_args)),
        environment=backend.environment, start_seconds=args.start_seconds, log_folder=args.logs,
    )  # fmt: skip


def header_of(args: argparse.Namespace, servers: dict[str, ServerOptions], workloads: Workloads) -> dict[str, Any]:
    return {
        "commit": args.commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": machine_name(),
        "tp": args.tp,
        "versions": package_versions(),
        "arguments": arguments_of(args),
        "servers": {
            backend: list(map(without_folders, options.command(port=0)[1:])) for backend, options in servers.items()
        },
        "inherited_environment": inherited_environment(),
        "environments": {backend: options.environment for backend, options in servers.items() if options.environment},
        "workloads": {
            name: {
                "requests": len(requests), "samples": sum(request.samples for request in requests),
                "prompt_tokens": sum(len(request.prompt) for request in requests),
                "output_tokens": sum(request.max_new_tokens * request.samples for request in requests),
            }
            for name, requests in workloads.items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
