"""An SGLang Engine in a process of its own that serves an offline batch (see `offline/engines.py`)."""

from __future__ import annotations

import asyncio
import threading
from multiprocessing.connection import Connection
from typing import Any

from sgl_prefix_attn.offline.answers import Answer, Choice
from sgl_prefix_attn.offline.engines import EngineArguments, Outcome, Ready, Task

# What SGLang's scheduler cuts off silently of a request that fills context or pool to the last token.
_KEPT_BACK = 6


def main(connection: Connection, arguments: EngineArguments) -> None:
    """Starts the engine and serves until None comes."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # `prefixpack` has to be known before the arguments are parsed
    engine = Engine(server_args=prepare_server_args(list(arguments.arguments)))
    try:
        pool = int(engine.get_server_info()["max_total_num_tokens"])
        connection.send(Ready(room=min(int(engine.tokenizer_manager.context_len), pool) - _KEPT_BACK))
        engine.loop.run_until_complete(_serve(engine, connection))
    finally:
        engine.shutdown()


async def _serve(engine: Any, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Task | None] = asyncio.Queue()
    threading.Thread(target=_read, args=(connection, loop, inbox), daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    while (task := await inbox.get()) is not None:
        job = loop.create_task(_generate(engine, connection, task))
        running.add(job)
        job.add_done_callback(running.discard)
    for job in running:
        job.cancel()


def _read(connection: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Task | None]) -> None:
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            task = None
        loop.call_soon_threadsafe(inbox.put_nowait, task)
        if task is None:
            return


async def _generate(engine: Any, connection: Connection, task: Task) -> None:
    try:
        result = await engine.async_generate(input_ids=task.tokens.tolist(), sampling_params=task.sampling)
        outcome = Outcome(task.number, _answer(result if isinstance(result, list) else [result]))
    except ValueError as error:  # how SGLang refuses a request
        outcome = Outcome(task.number, None, str(error))
    except RuntimeError as error:  # it gave the request up
        outcome = Outcome(task.number, None, f"the engine gave the request up: {error}")
    connection.send(outcome)


def _answer(samples: list[dict[str, Any]]) -> Answer:
    choices = []
    for sample in samples:
        reason = sample["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise RuntimeError(str(reason.get("message", "aborted")))
        choices.append(Choice(tuple(sample["output_ids"]), sample.get("text"), str(reason.get("type", ""))))
    meta = samples[0]["meta_info"]
    return Answer(tuple(choices), int(meta["prompt_tokens"]), int(meta.get("cached_tokens", 0)))
