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

from sgl_prefix_attn.offline.answers import Answer, Choice
from sgl_prefix_attn.offline.engines import EngineArguments, EnginePool, Outcome, Ready, StartEngines, Task
from sgl_prefix_attn.offline.runner import BatchOptions, BatchSummary, run_batch
from sgl_prefix_attn.offline.tokenize import PromptEncoder
from tests.offline.killed_batch import die_at

ROOM = 400
VOCABULARY = 1000
REFUSED_TOKEN = 999  # a prompt that begins with it is refused by the engine
DEADLY_TOKEN = 998  # the engine dies of it, once


def tokens_for(prompt: list[int], count: int) -> tuple[int, ...]:
    seed = zlib.crc32(repr(prompt).encode())
    return tuple(random.Random(seed).choices(range(1000), k=count))


def main(connection: Connection, arguments: EngineArguments) -> None:
    """Arguments: number of the engine, mean seconds a request takes, the file that notes what is executed."""
    number, seconds, noted = arguments.arguments
    connection.send(Ready(ROOM, VOCABULARY))
    rng = random.Random(os.getpid())
    held: list[Task] = []
    open_for_more = True
    with Path(noted).open("a") as log:
        while open_for_more or held:
            while open_for_more and (connection.poll(0 if held else None) or not held):
                task = connection.recv()
                if task is None:
                    return
                held.append(task)
            task = held.pop(rng.randrange(min(8, len(held))))
            time.sleep(rng.expovariate(1 / float(seconds)) if float(seconds) else 0)
            prompt = task.tokens.tolist()
            if prompt[0] == DEADLY_TOKEN and not Path(noted + ".died").exists():
                Path(noted + ".died").touch()
                print("the engine has found something deadly", flush=True)
                os._exit(3)
            log.write(f"{number} {task.number} {prompt}\n")
            log.flush()
            if prompt[0] == REFUSED_TOKEN:
                connection.send(Outcome(task.number, None, "no such prompts here"))
                continue
            samples = task.sampling["n"]
            choices = [
                Choice(tokens_for([*prompt, s], task.sampling["max_new_tokens"]), None, "length")
                for s in range(samples)
            ]
            cached = len(prompt) - 1 if samples > 1 else 0  # as SGLang reports it
            connection.send(Outcome(task.number, Answer(tuple(choices), len(prompt), cached)))


def options(source: Path, output: Path, engines: int = 1, seconds: float = 0.0, **more: object) -> BatchOptions:
    noted = str(output) + ".executed"
    log = output.with_suffix(".log")
    arguments = tuple(EngineArguments((str(n), str(seconds), noted), (), log) for n in range(engines))
    errors = output.with_suffix(".errors")
    usual = {"ordered": True, "window": 64}
    return BatchOptions(source, output, errors, "no-model", arguments, **{**usual, **more})  # type: ignore[arg-type]


def run(source: Path, output: Path, engines: int = 1, start: StartEngines = EnginePool, **more: Any) -> BatchSummary:
    """Runs a batch, with a model folder without a tokenizer."""
    encoder = PromptEncoder(str(output.parent))
    return run_batch(options(source, output, engines, **more), main, encoder.encode, start=start)


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
