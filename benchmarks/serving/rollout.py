"""Rollout as RL launchers send it: every sample a request of its own, outputs of different lengths, refilled.

    python -m benchmarks.serving.rollout --model PATH --load-format dummy --backends prefixpack,fa3,flashinfer \\
        --prompt-tokens 1024 4096 16384 --out build/rollout.json

Groups of --samples requests share a prompt. Prompt lengths are log-normal around --prompt-tokens (sigma 0.3), output
lengths exponential with mean --output-tokens. More requests wait than --running allows, so the server refills. What
is measured is a window of --window seconds of the steady state: it begins when as many samples have ended as the
server runs at a time. Reported are tokens per second in that window, decode step time by number of running requests,
the share of time in gaps with a prefill step, how often the prompt of a group was computed, tokens a request and step
(more than 1 with speculation), and packed and stock decode steps. The file is rewritten after every run; --resume skips
what it has. Without --model a tiny model on the CPU is used, to try the command.

Speculation over random weights accepts nothing. SGLANG_SIMULATE_ACC_LEN=2.5 makes SGLang accept so many tokens a step:

    SGLANG_SIMULATE_ACC_LEN=2.5 python -m benchmarks.serving.rollout --backends 'prefixpack[pack_verify=1],fa3' ... \\
        --server-args "--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT \\
        --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.provenance import git_commit
from benchmarks.serving import kernel_profile
from benchmarks.serving.__main__ import model_of
from benchmarks.serving.backends import Backend, UsageError, parse_backends
from benchmarks.serving.measure import growth
from benchmarks.serving.provenance import arguments_of, inherited_environment, machine_name, package_versions
from benchmarks.serving.step_log import LOG_ARGUMENTS, LOG_ENVIRONMENT, read_steps, summary
from sgl_prefix_attn.calibration.report import table_lines
from sgl_prefix_attn.demo.client import Answer, RequestError, Sample, replay
from sgl_prefix_attn.demo.server import Server, ServerError, ServerOptions, serve
from sgl_prefix_attn.demo.workload import Request, Vocabulary

Arguments = Sequence[str] | None
PROMPT_SIGMA = 0.3
FEWEST_TOKENS = 8
CPU_POOL_TOKENS = 16384
PROFILE_SECONDS = 3.0  # requests go on for so long after the window
TRACE_SECONDS = 60.0  # until the trace is written


class WindowOver(Exception):  # noqa: N818
    """The measured window has ended; open requests are dropped."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Sizes of a rollout; the distribution of lengths is in `rollout_requests`.

    Attributes:
        groups: prompts.
        samples: requests per prompt.
        prompt_tokens: median prompt length.
        output_tokens: mean output length.
        longest: tokens a request may have, prompt and output together.
    """

    groups: int
    samples: int
    prompt_tokens: int
    output_tokens: int
    longest: int
    seed: int


def rollout_requests(rollout: Rollout, vocabulary: Vocabulary) -> list[Request]:
    """Requests in the order in which a launcher sends them: the samples of a prompt follow each other.

    Raises:
        ValueError: the longest request leaves no room for an output.
    """
    if rollout.longest < 4 * FEWEST_TOKENS:
        raise ValueError(f"a request may have {rollout.longest} tokens; {4 * FEWEST_TOKENS} are needed at least")
    rng = np.random.default_rng((rollout.seed, rollout.prompt_tokens, rollout.output_tokens))
    requests = []
    for group in range(rollout.groups):
        drawn = rollout.prompt_tokens * np.exp(PROMPT_SIGMA * rng.standard_normal())
        length = int(np.clip(round(drawn), FEWEST_TOKENS, rollout.longest // 2))
        prompt = vocabulary.tokens(length, rollout.seed, group)
        outputs = np.clip(
            rng.exponential(rollout.output_tokens, rollout.samples), FEWEST_TOKENS, rollout.longest - length
        )
        requests += [
            Request(f"group-{group}-{sample}", prompt, int(output)) for sample, output in enumerate(outputs.tolist())
        ]
    return requests


@dataclasses.dataclass
class Window:
    """Counts tokens of the steady state.

    Attributes:
        begin_after: ended samples with which the window begins.
        seconds: its length.
        tail_seconds: how long requests go on after it, for the profile.
        prompt_tokens, computed_tokens: of the requests that ended since the window began.
    """

    begin_after: int
    seconds: float
    tail_seconds: float = 0.0
    ended: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    begun: float | None = None
    over: float | None = None
    begun_wall: float = 0.0
    _seen: dict[int, int] = dataclasses.field(default_factory=dict)
    _kept: list[Sample] = dataclasses.field(default_factory=list)

    def on_answer(self, answer: Answer) -> None:
        self.ended += len(answer.samples)
        if self.begun is None and self.ended >= self.begin_after:
            self.begun, self.begun_wall = time.perf_counter(), time.time()
        if self.begun is not None:
            self.prompt_tokens += len(answer.request.prompt) * len(answer.samples)
            self.computed_tokens += sum(len(answer.request.prompt) - sample.cached_tokens for sample in answer.samples)

    def on_token(self, request: Request, sample: Sample) -> None:
        if id(sample) not in self._seen:
            self._kept.append(sample)  # so that no later sample gets its id
        grown = len(sample.tokens) - self._seen.get(id(sample), 0)
        self._seen[id(sample)] = len(sample.tokens)
        if self.begun is None:
            return
        now = time.perf_counter()
        if self.over is None:
            self.tokens += grown
            if now - self.begun >= self.seconds:
                self.over = now
        if self.over is not None and now - self.over >= self.tail_seconds:
            raise WindowOver

    @property
    def measured_seconds(self) -> float:
        assert self.begun is not None
        return (self.over or time.perf_counter()) - self.begun


def measure(server: Server, requests: Sequence[Request], running: int, args: argparse.Namespace) -> dict[str, Any]:
    """One window on one server.

    Raises:
        RequestError: the requests ended before the window did; more groups are needed.
    """
    server.flush_cache()
    tail = PROFILE_SECONDS if args.profile_steps else 0.0
    window = Window(begin_after=min(running, len(requests) // 3), seconds=args.window, tail_seconds=tail)
    before = server.packing_state()
    begun = time.perf_counter()
    traces = args.logs / f"trace-{server.process.pid}-{len(requests[0].prompt)}"
    profiler = threading.Thread(target=profile_after, args=(window, server, traces, args.profile_steps), daemon=True)
    if args.profile_steps:
        profiler.start()
    try:
        replay(server.url, requests, on_answer=window.on_answer, on_token=window.on_token, timeout_seconds=args.limit)
    except WindowOver:
        pass
    except aiohttp.ClientError:
        if window.over is None:  # later: the profiler took the server down, the window stands
            raise
    else:
        raise RequestError(f"all {len(requests)} requests ended before the window of {args.window:g} s; raise --groups")
    after = server.packing_state()
    server.post("/abort_request", {"abort_all": True})
    end = window.begun_wall + window.measured_seconds
    steps = [
        s for s in read_steps(server.log_text().splitlines()) if window.begun_wall <= s.end - s.seconds and s.end <= end
    ]
    grown = growth(before["counters"], after["counters"]) if before and after else {}
    trace = kernel_profile.wait_for_trace(traces, TRACE_SECONDS) if args.profile_steps else None
    return {
        "profile": None if trace is None else kernel_profile.read_trace(trace, args.profile_steps),
        "tokens_per_second": round(window.tokens / window.measured_seconds, 1),
        "window_seconds": round(window.measured_seconds, 2),
        "seconds": round(time.perf_counter() - begun, 1),
        "ended_samples": window.ended,
        "prompts_computed": round(args.samples * window.computed_tokens / max(1, window.prompt_tokens), 2),
        "steps": summary(steps),
        "routed_steps": grown.get("routed_steps", {}),
        "steps_packed": grown.get("steps_packed", {}),
        "fallbacks": grown.get("fallbacks", {}),
    }


def profile_after(window: Window, server: Server, traces: Path, steps: int) -> None:
    """Traces some steps once the window is over, while requests still run."""
    while window.over is None:
        time.sleep(0.05)
    kernel_profile.start(server, traces, steps)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.rollout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--backends", metavar="A,B,...", help="prefixpack,fa3,flashinfer; CPU: prefixpack,torch_native")
    result.add_argument("--output-tokens", type=int, default=700, metavar="N", help="mean (700)")
    result.add_argument("--groups", type=int, default=256, metavar="N", help="prompts (256)")
    result.add_argument("--window", type=float, default=30.0, metavar="S", help="seconds measured per run (30)")
    result.add_argument(
        "--profile-steps", type=int, default=0, metavar="N", help="steps to trace after the window (0: none)"
    )
    result.add_argument("--limit", type=float, default=90.0, metavar="S", help="seconds a run may take (90)")
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
        model=model, backend=backend.name, device=device, extra=(*extra, *shlex.split(args.server_args)),
        environment={**backend.environment, **LOG_ENVIRONMENT}, start_seconds=args.start_seconds, log_folder=args.logs,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.profile_steps and not args.model:
        raise UsageError("--profile-steps needs a GPU: SGLang's profiler traces no kernels on a CPU")
    args.backends = args.backends or ("prefixpack,fa3,flashinfer" if args.model else "prefixpack,torch_native")
    backends = parse_backends(args.backends, "--backends")
    model, vocabulary, context = model_of(args)
    longest = max(args.prompt_tokens)
    if longest > context // 2:  # where prompts are cut: most would have another length
        least = f"prompts of {longest} tokens need a context of {2 * longest} at least"
        raise UsageError(f"{least}, not {context}; raise --context-length")
    results = opened(args)
    deadline = time.monotonic() + args.seconds
    for name, backend in backends.items():
        left = [n for n in args.prompt_tokens if not has_run(results, name, n)]
        if not left or time.monotonic() > deadline:
            continue
        print(f"{name}: starting the server", file=sys.stderr, flush=True)
        try:
            with serve(server_options(args, model, backend)) as server:
                for prompt_tokens in left:
                    if time.monotonic() > deadline:
                        break
                    sizes = Rollout(
                        args.groups, args.samples, prompt_tokens, args.output_tokens, context, results["seed"]
                    )
                    row = measure(server, rollout_requests(sizes, vocabulary), args.running, args)
                    results["runs"].append({"backend": name, "prompt_tokens": prompt_tokens, **row})
                    write(args.out, results)
                    print(
                        f"{name}, prompts of {prompt_tokens}: {row['tokens_per_second']:.0f} tokens/s", file=sys.stderr
                    )
        except (ServerError, RequestError, aiohttp.ClientError, TimeoutError) as error:
            results["failures"][name] = f"{type(error).__name__}: {error}"
            write(args.out, results)
            print(f"{name}: {error}", file=sys.stderr)
    print(table(results))
    missing = [(name, n) for name in backends for n in args.prompt_tokens if not has_run(results, name, n)]
    if missing:
        print(f"{len(missing)} runs are missing; go on with --resume", file=sys.stderr)
    return 1 if missing else 0


def opened(args: argparse.Namespace) -> dict[str, Any]:
    if args.resume and args.out is not None and args.out.exists():
        found: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8"))
        found["failures"] = {}
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


def has_run(results: dict[str, Any], backend: str, prompt_tokens: int) -> bool:
    return any(row["backend"] == backend and row["prompt_tokens"] == prompt_tokens for row in results["runs"])


def write(path: Path | None, results: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def table(results: dict[str, Any]) -> str:
    columns = ("prompt", "backend", "tokens/s", "of the best other", "a step", "time with prefill", "steps packed")
    rows = [columns]
    for prompt_tokens in dict.fromkeys(row["prompt_tokens"] for row in results["runs"]):
        runs = [row for row in results["runs"] if row["prompt_tokens"] == prompt_tokens]
        for row in runs:
            others = [other["tokens_per_second"] for other in runs if other is not row]
            share, accepted = row["steps"]["share_of_time_with_prefill"], row["steps"].get("accepted_tokens")
            routed = row["routed_steps"]
            rows.append((
                str(prompt_tokens), row["backend"], f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_second'] / max(others):.2f}" if others else "",
                "" if accepted is None else f"{accepted:.2f}",
                "" if share is None else f"{share:.0%}",
                f"{routed.get('packed', 0)} of {sum(routed.values())}" if routed else "",
            ))  # fmt: skip
    return "\n".join(table_lines(rows)) if len(rows) > 1 else "nothing was measured"


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
