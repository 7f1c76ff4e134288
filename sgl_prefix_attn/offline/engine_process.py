"""An SGLang Engine in a process of its own that serves an offline batch (see `offline/engines.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from sgl_prefix_attn.offline.answers import Answer, Choice
from sgl_prefix_attn.offline.engines import EngineArguments, Outcome, Ready, Task
from sgl_prefix_attn.settings import variable_name

# What SGLang's scheduler cuts off silently of a request that fills context or pool to the last token.
_KEPT_BACK = 6
_QUEUE_FULL = "queue is full"  # in SGLang's words for a request beyond --max-queued-requests
_RETRY_SECONDS = 0.5
_LONE_REFUSALS = 10  # while nobody is served


def main(connection: Connection, arguments: EngineArguments) -> None:
    """Starts the engine and serves until None comes."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    name = variable_name("group_scheduling")
    os.environ[name] = os.environ.get(name) or "1"  # the scheduler process inherits it
    load_plugins()  # `prefixpack` has to be known before the arguments are parsed
    engine = Engine(server_args=prepare_server_args(list(arguments.arguments)))
    try:
        room = _room(int(engine.tokenizer_manager.context_len), engine.get_server_info())
        connection.send(Ready(room, _vocab_size(engine)))
        engine.loop.run_until_complete(_serve(engine, connection))
    finally:
        engine.shutdown()


def _room(context: int, server: Mapping[str, Any]) -> int:
    """Most tokens of a prompt and its output."""
    # SGLang rounds the prompt up to whole pages, and keeps one more page: what does not fit is cut or never admitted.
    rounded = 2 * (int(server.get("page_size") or 1) - 1)
    return min(context, int(server["max_total_num_tokens"]) - rounded) - _KEPT_BACK


def _vocab_size(engine: Any) -> int | None:
    """The model's vocabulary, where this version of SGLang tells it."""
    size = getattr(getattr(engine.tokenizer_manager, "model_config", None), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


async def _serve(engine: Any, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Task | None] = asyncio.Queue()
    threading.Thread(target=_read, args=(connection, loop, inbox), daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    requests = _Requests(engine)
    while (task := await inbox.get()) is not None:
        job = loop.create_task(_report(requests, connection, task))
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


async def _report(requests: _Requests, connection: Connection, task: Task) -> None:
    connection.send(await requests.outcome(task))


class _Requests:
    """The requests that an engine has; every one gets an outcome, or the batch would wait for it for ever."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tries = 0
        self._inside: dict[int, int] = {}  # request -> which try this is, oldest first
        self._one_by_one = asyncio.Lock()
        self._ended = 0  # tries there had been when a request ended last

    async def outcome(self, task: Task) -> Outcome:
        """Runs a request; again while SGLang's queue is full of others."""
        refused_last, refusals = 0, -1  # the first refusal says nothing yet
        while True:
            # When nobody is served, those that come and go take the room from each other.
            async with self._one_by_one if refusals >= 2 else contextlib.nullcontext():
                outcome, reason = await self._try(task)
            if outcome is not None:
                self._ended = self._tries
                return outcome
            # Who has been inside since this one was refused last is being served. Samples of a request of which others
            # were refused are not counted: they end soon.
            oldest = next(iter(self._inside.values()), self._tries)
            refusals = 0 if oldest <= refused_last or self._ended > refused_last else refusals + 1
            refused_last = self._tries
            if refusals == _LONE_REFUSALS:  # then nobody will make room
                more = "It has no room for this request; raise --max-queued-requests"
                return Outcome(task.number, None, f"{reason} {more}")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _try(self, task: Task) -> tuple[Outcome | None, str]:
        """What became of a request; None and SGLang's words if its queue was full."""
        self._tries += 1
        self._inside[task.number] = self._tries
        try:
            tokens = task.tokens.tolist()
            result = await self._engine.async_generate(input_ids=tokens, sampling_params=task.sampling)
            return Outcome(task.number, _answer(result if isinstance(result, list) else [result])), ""
        except ValueError as error:  # how SGLang refuses a request
            return Outcome(task.number, None, str(error)), ""
        except Exception as error:  # it gave the request up, with whatever exception its version has for that
            reason = _reason(error)
        finally:
            del self._inside[task.number]
        if _QUEUE_FULL in reason:
            return None, reason
        return Outcome(task.number, None, f"the engine gave the request up: {reason}"), ""


def _reason(error: Exception) -> str:
    """An exception of SGLang's in words: FastAPI's carry them in `detail`."""
    if isinstance(error, _AbortedError):
        return str(error)
    return str(getattr(error, "detail", None) or f"{type(error).__name__}: {error}")


class _AbortedError(Exception):
    """SGLang ended a request without an answer; says why."""


def _answer(samples: list[dict[str, Any]]) -> Answer:
    choices = []
    for sample in samples:
        reason = sample["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise _AbortedError(str(reason.get("message", "aborted")))
        choices.append(Choice(tuple(sample["output_ids"]), sample.get("text"), str(reason.get("type", ""))))
    meta = samples[0]["meta_info"]
    return Answer(tuple(choices), int(meta["prompt_tokens"]), int(meta.get("cached_tokens", 0)))
