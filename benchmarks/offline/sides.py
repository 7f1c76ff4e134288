"""Engines that run a batch one way: `Engine.generate`, or the batch runner with its journal and all."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from sgl_prefix_attn.offline import engine_process
from sgl_prefix_attn.offline.engines import EngineArguments, EnginePool
from sgl_prefix_attn.offline.messages import Checked, Go, Line, Planned, Refused, Steps
from sgl_prefix_attn.offline.progress import Progress
from sgl_prefix_attn.offline.runner import BatchOptions, run_batch

PromptLists = list[list[int]]
_WARM_UP = [[11 + n] * 50 for n in range(8)]


@dataclass(frozen=True)
class Launch:
    """How a process starts its engine: arguments as for the server, variables to add, the model's folder."""

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    model: str


@dataclass(frozen=True)
class Run:
    """One measurement. `outputs`: checksum of the tokens by prompt, in the order of sorted prompts."""

    seconds: float
    cpu_seconds: float
    cached_tokens: int
    outputs: tuple[int, ...]


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
    """Stay for the next batch. Its prompts are token ids, so that nobody has to plan them."""

    def check(self, lines: Sequence[Line]) -> Checked:
        self._kept = [] if self._engines[0].ready is None else lines
        return Checked([], {}) if self._kept else super().check(lines)

    def plan(self, go: Go) -> Iterator[Planned | Refused]:
        for line in self._kept:
            body = json.loads(line.text)["body"]
            tokens = np.array(body["prompt"], dtype=np.int32)
            yield Planned(line.number, tokens, body["max_tokens"], body["max_tokens"], 1)
        if not self._kept:
            yield from super().plan(go)

    def finish(self) -> list[Steps]:
        return []

    def __exit__(self, *exception: object) -> None:
        pass

    def close(self) -> None:
        super().__exit__()


def checksums(prompts: PromptLists, answers: list[list[int]]) -> tuple[int, ...]:
    return tuple(zlib.crc32(json.dumps(answer).encode()) for _, answer in sorted(zip(prompts, answers, strict=True)))


def serve_plain(connection: Connection, launch: Launch) -> None:
    """In a process of its own: an Engine, and a `Run` for each (prompts, output tokens) until None comes."""
    os.environ.update(launch.environment)
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    engine = Engine(server_args=prepare_server_args(list(launch.arguments)))

    def run(prompts: PromptLists, output: int) -> Run:
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        engine.flush_cache()  # the same prompts in another order came before
        cpu, started = cpu_seconds(), time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        return Run(seconds, cpu, cached, checksums(prompts, [answer["output_ids"] for answer in answers]))

    _serve(connection, run)
    engine.shutdown()


def serve_runner(connection: Connection, launch: Launch) -> None:
    """As `serve_plain`, by the batch runner with its journal and all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        engine = EngineArguments(launch.arguments, launch.environment, folder / "log")
        options = BatchOptions(source, target, folder / "errors", launch.model, (engine,), ordered=True, overwrite=True)

        def run(prompts: PromptLists, output: int) -> Run:
            body = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            lines = [
                {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
                for n, prompt in enumerate(prompts)
            ]
            source.write_text("".join(json.dumps(line) + "\n" for line in lines))
            progress = CpuProgress()
            summary = run_batch(options, engine_process.main, progress, lambda *_: engines)
            answers = [json.loads(text)["response"]["body"]["choices"][0]["token_ids"] for text in target.open()]
            return Run(summary.seconds, progress.spent, summary.cached_tokens, checksums(prompts, answers))

        # Also after an error: this process would wait for its engine for ever.
        with contextlib.closing(KeptEngines(engine_process.main, [engine])) as engines:
            _serve(connection, run)


def _serve(connection: Connection, run: Callable[[PromptLists, int], Run]) -> None:
    run(_WARM_UP, 4)
    connection.send(None)  # ready
    while (job := connection.recv()) is not None:
        connection.send(run(*job))


class Side:
    """A process that runs batches one way."""

    def __init__(self, serve: Callable[[Connection, Launch], None], launch: Launch) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, launch))
        self._process.start()
        theirs.close()
        try:
            self._connection.recv()
        except EOFError:
            raise RuntimeError(f"no engine started with {' '.join(launch.arguments)}; its output is above") from None

    def run(self, prompts: PromptLists, output: int) -> Run:
        self._connection.send((prompts, output))
        run = self._connection.recv()
        assert isinstance(run, Run)
        return run

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()
