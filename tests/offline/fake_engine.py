"""An engine process without a model: answers depend on the prompt alone, in an order and at a speed of its own.

`python -m tests.offline.fake_engine IN OUT ENGINES SECONDS [--die-at LINES SEED]` runs a batch on it; what it executes
is noted in OUT.executed, a line number each (with the engine's number). --die-at: see killed_batch.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from sgl_prefix_attn.offline.answers import Answer
from sgl_prefix_attn.offline.engines import EngineArguments, EnginePool, StartEngines
from sgl_prefix_attn.offline.messages import Checked, Line, Outcome, Planned, Ready, Refused, Steps, Task
from sgl_prefix_attn.offline.runner import BatchOptions, BatchSummary, run_batch
from tests.offline.killed_batch import die_at

ROOM = 400
REFUSED_TOKEN = 999  # a prompt that begins with it is refused by the engine
DEADLY_TOKEN = 998  # the engine dies of it, once


def tokens_for(prompt: list[int], count: int) -> tuple[int, ...]:
    seed = zlib.crc32(repr(prompt).encode())
    return tuple(random.Random(seed).choices(range(1000), k=count))


def meaning(line: Line) -> Planned | Refused:
    body = json.loads(line.text)["body"]
    if isinstance(body["prompt"], str):
        return Refused(line.number, "invalid_request", "the model has no tokenizer")
    tokens = np.array(body["prompt"], dtype=np.int32)
    return Planned(line.number, tokens, body["max_tokens"], body["max_tokens"], body.get("n", 1))


def plan(connection: Connection) -> bool:
    """What an engine does before it takes requests; False if it is not to load."""
    lines = connection.recv()
    refused = [Refused(line.number, "invalid_request", "no 0") for line in lines if b'"max_tokens": 0' in line.text]
    surprises = sum(b"surprise" in line.text for line in lines)
    connection.send(Checked(refused, {"surprise": surprises} if surprises else {}))
    if not connection.recv():
        return False
    wrong = {line.number for line in refused}
    for line in lines:
        if line.number not in wrong:
            connection.send([meaning(line)])
    connection.send(Ready(ROOM, strict=True))
    return True


def answer(prompt: list[int], tokens: list[tuple[int, ...]], cached: int = 0) -> Answer:
    choices = [{"index": index, "token_ids": list(part)} for index, part in enumerate(tokens)]
    count = sum(map(len, tokens))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    return Answer({"id": "x", "created": 0, "choices": choices, "usage": usage}, len(prompt), count, cached)


def main(connection: Connection, arguments: EngineArguments) -> None:
    """Arguments: number of the engine, mean seconds a request takes, the file that notes what is executed."""
    number, seconds, noted = arguments.arguments
    if not plan(connection):
        return
    rng = random.Random(os.getpid())
    held: list[Task] = []
    open_for_more = True
    with Path(noted).open("a") as log:
        while open_for_more or held:
            while open_for_more and (connection.poll(0 if held else None) or not held):
                task = connection.recv()
                if task is None:
                    connection.send(Steps(2, 10, 1))
                    return
                held.append(task)
            task = held.pop(rng.randrange(min(8, len(held))))
            time.sleep(rng.expovariate(1 / float(seconds)) if float(seconds) else 0)
            body = json.loads(task.text)["body"]
            prompt = body["prompt"]
            if prompt[0] == DEADLY_TOKEN and not Path(noted + ".died").exists():
                Path(noted + ".died").touch()
                print("the engine has found something deadly", flush=True)
                os._exit(3)
            log.write(f"{number} {task.number} {prompt}\n")
            log.flush()
            if prompt[0] == REFUSED_TOKEN:
                connection.send(Outcome(task.number, None, "no such prompts here"))
                continue
            samples = body.get("n", 1)
            cached = len(prompt) - 1 if samples > 1 else 0  # as SGLang reports it
            tokens = [tokens_for([*prompt, s], body["max_tokens"]) for s in range(samples)]
            connection.send(Outcome(task.number, answer(prompt, tokens, cached)))


def options(source: Path, output: Path, engines: int = 1, seconds: float = 0.0, **more: object) -> BatchOptions:
    noted = str(output) + ".executed"
    log = output.with_suffix(".log")
    arguments = tuple(EngineArguments((str(n), str(seconds), noted), (), log) for n in range(engines))
    errors = output.with_suffix(".errors")
    usual = {"ordered": True, "window": 64}
    return BatchOptions(source, output, errors, "no-model", arguments, **{**usual, **more})  # type: ignore[arg-type]


def run(source: Path, output: Path, engines: int = 1, start: StartEngines = EnginePool, **more: Any) -> BatchSummary:
    return run_batch(options(source, output, engines, **more), main, start=start)


def executed(output: Path) -> list[tuple[int, str]]:
    """(engine, prompt) of everything that was executed."""
    lines = Path(f"{output}.executed").read_text().splitlines()
    return [(int(text.split()[0]), text.split(" ", 2)[2]) for text in lines]


def engines_of_groups(output: Path) -> list[set[int]]:
    """Engines that executed requests of each group of `batches.grouped`."""
    engines: dict[str, set[int]] = {}
    for engine, prompt in executed(output):
        engines.setdefault(str(json.loads(prompt)[:40]), set()).add(engine)
    return list(engines.values())


if __name__ == "__main__":
    from tests.offline import fake_engine  # a process that is spawned finds `main` by the module's name

    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("engines", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--die-at", type=int, nargs=2, metavar=("LINES", "SEED"))
    arguments = parser.parse_args()
    if arguments.die_at:
        die_at(arguments.die_at[0], random.Random(arguments.die_at[1]))
    fake_engine.run(arguments.source, arguments.output, arguments.engines, seconds=arguments.seconds)
