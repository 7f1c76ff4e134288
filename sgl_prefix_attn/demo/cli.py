"""`python -m sgl_prefix_attn demo`: the same requests to the stock backend and to prefixpack, on the real server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
from tqdm import tqdm

from sgl_prefix_attn.core.files import check_writable, write_whole
from sgl_prefix_attn.demo.client import RequestError, replay
from sgl_prefix_attn.demo.comparison import Comparison, KVReads, Measurement, table
from sgl_prefix_attn.demo.server import Server, ServerError, ServerOptions, serve
from sgl_prefix_attn.demo.workload import (
    TRACE_SLICE,
    Request,
    Vocabulary,
    diverging_group,
    sample_group,
    three_level_prompts,
    trace_requests,
)
from sgl_prefix_attn.trace import TraceError, read_trace

BACKEND = "prefixpack"
DEFAULT_CONTEXT = {"cpu": 4096, "cuda": 16384}
STOCK_BACKEND = {"cpu": "torch_native", "cuda": "fa3"}
_WARM_UP = Request("warm-up", tuple(range(100, 164)), 8)


class DemoError(Exception):
    """The demonstration cannot run as asked. The message says what to change."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to run: one server per backend, every workload on each."""

    servers: tuple[ServerOptions, ServerOptions]  # stock, packed
    workloads: tuple[tuple[str, list[Request]], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start the real SGLang server twice, with a stock attention backend and with prefixpack, give both the same "
        "requests with greedy decoding, and compare tokens, latencies and KV reads. Without --model a tiny model with "
        "random weights is made and kept in the user's cache folder. Exit status 1: some token differs."
    )
    parser.add_argument("--model", help="model folder or name (default: a tiny random-weight Llama)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda with --model on a GPU machine, else cpu"
    )
    parser.add_argument(
        "--context-length", type=int, help="tokens a request may have (default: 4096 on cpu, else 16384)"
    )
    parser.add_argument("--trace", type=Path, default=TRACE_SLICE, help="Mooncake trace (default: the shipped slice)")
    parser.add_argument("--requests", type=int, default=200, help="trace requests to replay (default: 200)")
    parser.add_argument(
        "--speed", type=float, default=8.0, help="how much faster than recorded they arrive (default: 8)"
    )
    parser.add_argument("--output-scale", type=float, default=0.1, help="share of the recorded output (default: 0.1)")
    parser.add_argument("--samples", type=int, default=16, help="continuations of the one prompt (default: 16)")
    parser.add_argument("--stock-backend", help="what to compare with (default: torch_native on cpu, fa3 on cuda)")
    parser.add_argument("--server-args", default="", help="more arguments for both servers, as one quoted string")
    parser.add_argument(
        "--start-seconds", type=float, default=3600.0,
        help="a server may take to start, while its log or processor time moves (default: 3600)",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' logs in")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def run(args: argparse.Namespace) -> int:
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        plan = _plan(args)
        runs = [_serve_all(options, plan.workloads) for options in plan.servers]
    except (DemoError, TraceError, ServerError, RequestError, aiohttp.ClientError) as error:
        print(f"demo: {error}", file=sys.stderr)
        if isinstance(error, ServerError):
            print("demo: environment and model are kept; the same call starts the servers again", file=sys.stderr)
        return 2
    except TimeoutError:
        print("demo: a server answers no more: none of its requests got a token for ten minutes", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)
    names = [name for name, _ in plan.workloads]
    comparisons = [Comparison(name, *pair) for name, *pair in zip(names, *runs, strict=True)]
    _print_result(comparisons, plan.servers[0])
    if args.json:
        try:
            write_whole(args.json, (json.dumps(_record(args, plan, comparisons), indent=1) + "\n").encode())
        except ValueError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
    return 0 if all(comparison.identical for comparison in comparisons) else 1


def _leave(number: int, frame: FrameType | None) -> None:
    # An exception stops the servers on the way out.
    raise SystemExit(128 + number)


def _plan(args: argparse.Namespace) -> _Plan:
    for name, smallest in (("requests", 1), ("samples", 1), ("context_length", 256)):
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise DemoError(f"--{name.replace('_', '-')} {value}: at least {smallest}")
    if not args.start_seconds > 0:  # NaN as well
        raise DemoError(f"--start-seconds {args.start_seconds:g}: expected more than 0")
    server_args = _words_of(args.server_args)
    _check_outputs(args)
    device = args.device or ("cuda" if args.model and _has_gpu() else "cpu")
    context = args.context_length or DEFAULT_CONTEXT[device]
    model, vocabulary = _model(args.model)
    extra = ["--context-length", str(context)]
    if device == "cpu":
        extra += ["--max-total-tokens", str(8 * context), "--max-running-requests", "64"]
    extra += server_args
    stock, packed = (
        ServerOptions(model, backend, device, tuple(extra), start_seconds=args.start_seconds, log_folder=args.logs)
        for backend in (args.stock_backend or STOCK_BACKEND[device], BACKEND)
    )
    rows = read_trace(args.trace, args.requests)
    try:
        trace = trace_requests(rows, vocabulary, context, speed=args.speed, output_scale=args.output_scale)
    except ValueError as error:
        raise DemoError(str(error)) from error
    prompt, generated = context // 4, min(64, context // 8)
    workloads = (
        (f"trace, {len(rows)} requests", trace),
        (f"n={args.samples} of one prompt", sample_group(vocabulary, prompt, generated, args.samples)),
        (f"{args.samples} diverging samples", diverging_group(vocabulary, prompt, generated, args.samples, seed=1)),
        ("three-level prompts", three_level_prompts(vocabulary, generated)),
    )
    return _Plan((stock, packed), workloads)


def _words_of(server_args: str) -> list[str]:
    try:
        return shlex.split(server_args)
    except ValueError as error:
        raise DemoError(f"--server-args {server_args}: {error}") from error


def _check_outputs(args: argparse.Namespace) -> None:
    """Finds before the servers run what could not be written after them."""
    try:
        if args.json:
            check_writable(args.json)
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        raise DemoError(f"--json {error}") from error
    except OSError as error:
        raise DemoError(f"--logs {args.logs}: cannot make the folder: {error.strerror}") from error


def _model(name: str | None) -> tuple[str, Vocabulary]:
    if name is None:
        from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model

        return str(tiny_model()), Vocabulary(RESERVED_TOKENS, VOCABULARY)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DemoError(f"--model {name}: {error}") from error
    size = config.get_text_config().vocab_size
    # Special tokens sit at the ends of a vocabulary; random ids from the middle are text to any model.
    return name, Vocabulary(size // 8, size - size // 8)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _serve_all(options: ServerOptions, workloads: Sequence[tuple[str, list[Request]]]) -> list[Measurement]:
    backend = str(options.backend)
    with contextlib.ExitStack() as stack:
        with _progress(desc=f"starting SGLang with {backend}", bar_format="{desc}: {elapsed}", miniters=0) as bar:
            server = stack.enter_context(serve(options, on_wait=lambda seconds: bar.update(0)))
        replay(server.url, [_WARM_UP])
        return [_measure(server, name, requests) for name, requests in workloads]


def _measure(server: Server, name: str, requests: list[Request]) -> Measurement:
    backend = str(server.options.backend)
    server.flush_cache()
    before = server.packing_state()
    if before is None and backend == BACKEND:
        raise server.failure(f"the server does not report {BACKEND}'s state: is the plug-in installed beside SGLang?")
    started = time.perf_counter()
    with _progress(total=len(requests), desc=f"{backend}: {name}", unit="request") as bar:
        answers = replay(server.url, requests, on_answer=lambda answer: bar.update())
    seconds = time.perf_counter() - started
    if before is None:
        return Measurement(backend, tuple(answers), seconds, None, {})
    after = server.packing_state() or before
    earlier = before["counters"]["fallbacks"]
    fallbacks = {reason: count - earlier.get(reason, 0) for reason, count in after["counters"]["fallbacks"].items()}
    fallbacks = {reason: count for reason, count in fallbacks.items() if count}
    return Measurement(backend, tuple(answers), seconds, KVReads.between(before, after), fallbacks)


def _progress(**options: Any) -> tqdm[Any]:
    # In a log file a bar is a line each time it changes.
    return tqdm(mininterval=0.1 if sys.stderr.isatty() else 10.0, **options)


def _print_result(comparisons: Sequence[Comparison], stock: ServerOptions) -> None:
    print()
    print(table(comparisons))
    fallbacks: dict[str, int] = {}
    for comparison in comparisons:
        for reason, count in comparison.packed.fallbacks.items():
            fallbacks[reason] = fallbacks.get(reason, 0) + count
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(fallbacks.items())) or "none"
    print(f"\nsteps that fell back to {stock.backend}: {reasons}")
    if stock.device == "cpu":
        print("Latencies of a tiny model on a CPU say nothing about a GPU; tokens and KV reads do.")
    for comparison in comparisons:
        for line in comparison.differences():
            print(f"different: {comparison.workload}: {line}")
    if all(comparison.identical for comparison in comparisons):
        print("Every token is identical.")
    elif stock.device != "cpu":
        print("In half precision, near ties between two tokens may fall either way.")
    print(_closing(comparisons))


def _closing(comparisons: Sequence[Comparison]) -> str:
    """What was shown, and what to do next."""
    by_saved = sorted((run.kv.saved, name) for name, run in ((c.workload, c.packed) for c in comparisons) if run.kv)
    lines = ["\nShown: the same requests to both servers, their tokens compared one by one."]
    if by_saved and by_saved[-1][0] > 0:
        (least, few), (most, many) = by_saved[0], by_saved[-1]
        lines += [
            f"Packed steps read {least:.1%} ({few}) to {most:.1%} ({many}) less KV.",
            "Only requests that run at the same time and share a prefix save reads.",
        ]
    else:
        lines.append("No packed step shared KV: the line on steps that fell back says why.")
    lines += [
        "Next: what your own batches would save: python -m sgl_prefix_attn explain --batch FILE",
        "      what of your server would run packed: python -m sgl_prefix_attn doctor YOUR LAUNCH COMMAND",
    ]
    return "\n".join(lines)


def _record(args: argparse.Namespace, plan: _Plan, comparisons: Sequence[Comparison]) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "sglang": importlib.metadata.version("sglang"),
        "torch": importlib.metadata.version("torch"),
        "arguments": {key: str(value) for key, value in vars(args).items() if key not in ("run", "command")},
        "servers": [options.command(port=0)[1:] for options in plan.servers],
        "comparisons": [comparison.as_json() for comparison in comparisons],
    }
