"""An SGLang Engine in a process of its own that serves an offline batch (see `offline/engines.py`)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from sgl_prefix_attn.offline import token_batching
from sgl_prefix_attn.offline.engines import EngineArguments
from sgl_prefix_attn.offline.messages import Go, Line, Outcome, Ready, Steps, Task, Unusable
from sgl_prefix_attn.offline.queue_order import STEPS_KEY
from sgl_prefix_attn.offline.sglang_requests import Handlers, RefusedError, check, reason
from sgl_prefix_attn.settings import variable_name

# What SGLang's scheduler cuts off silently of a request that fills context or pool to the last token.
_KEPT_BACK = 6
_QUEUE_FULL = "queue is full"  # in SGLang's words for a request beyond --max-queued-requests
_RETRY_SECONDS = 0.5
_LONE_REFUSALS = 10  # while nobody is served
_LINES_AT_ONCE = 64
# Arguments of SGLang's server that mean nothing to a batch, or nothing that it could do, by their names there.
_OF_THE_SERVER = {
    "admin_api_key", "api_key", "asr_max_buffer_seconds", "asr_max_concurrent_sessions", "disaggregation_mode",
    "enable_http2", "enable_response_store", "enable_ssl_refresh", "encoder_only", "fastapi_root_path",
    "file_storage_path", "gated_launch_port", "grpc_http_sidecar_port", "grpc_mode", "grpc_port", "host",
    "http2_initial_connection_window_size", "http2_max_concurrent_streams", "is_embedding", "log_level_http",
    "node_rank", "sidecar", "sidecar_args", "skip_server_warmup", "smg_grpc_mode", "smg_http_sidecar_port",
    "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "stream_response_default_include_usage",
    "tokenizer_worker_num", "tool_server", "use_ray", "uvicorn_access_log_exclude_prefixes", "warmups",
}  # fmt: skip


def main(connection: Connection, arguments: EngineArguments) -> None:
    """Checks lines, starts the engine, plans the lines while it loads, and serves until None comes."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins

    name = variable_name("group_scheduling")
    os.environ[name] = os.environ.get(name) or "1"  # the scheduler process inherits it
    load_plugins()  # `prefixpack` has to be known before the arguments are parsed
    lines: Sequence[Line] = connection.recv()
    try:
        server_args = _server_args(arguments.arguments)
    except ValueError as error:
        connection.send(Unusable(str(error)))
        return
    checked = check(lines)
    connection.send(checked)
    go: Go | None = connection.recv()
    if go is None:
        return
    server_args, unmixed = _mixed(arguments.arguments, server_args, go)
    wrong = {refused.number for refused in checked.refused}
    usable = [line for line in lines if line.number not in wrong]
    made: list[Handlers] = []

    class PlanningEngine(Engine):
        """Has its tokenizer manager plan the lines while the schedulers, which are started before, load the model."""

        @staticmethod
        def init_tokenizer_manager_func(*arguments: Any) -> Any:
            manager, templates = Engine.init_tokenizer_manager_func(*arguments)
            made.append(Handlers(manager, templates))
            planned = made[-1].plan(usable)
            while part := list(itertools.islice(planned, _LINES_AT_ONCE)):
                connection.send(part)
            return manager, templates

    engine = PlanningEngine(server_args=server_args)
    try:
        connection.send(_ready(int(engine.tokenizer_manager.context_len), engine.get_server_info(), unmixed))
        engine.loop.run_until_complete(_serve(made[-1], connection))
        with contextlib.suppress(OSError):  # nobody is there to read it
            connection.send(_steps(engine.get_server_info()))
    finally:
        engine.shutdown()


def _server_args(arguments: Sequence[str]) -> Any:
    """SGLang's object of these arguments.

    Raises:
        ValueError: SGLang does not take them, or one is of its HTTP server.
    """
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = {action.dest: action.option_strings for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # so that what is left is what was given
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            given = vars(parser.parse_args(list(arguments)))
            if foreign := sorted(_OF_THE_SERVER & given.keys()):
                names = ", ".join(options[dest][0] for dest in foreign)
                raise ValueError(f"{names}: of SGLang's HTTP server, which a batch does not run; leave it away")
            return prepare_server_args(list(arguments))
    except SystemExit as error:
        message = told.getvalue().strip().rpartition("error: ")[2] or "no arguments for an engine"
        raise ValueError(f"--server-args: {message}") from error
    except Exception as error:  # SGLang's checks raise what they like
        raise ValueError(f"--server-args: {error}") from error


def _mixed(arguments: Sequence[str], server_args: Any, go: Go) -> tuple[Any, str]:
    """The arguments with steps that mix prefills and decodes, if the job is to have them, and else why it has none."""
    if server_args.enable_mixed_chunk or go.batching == "off":
        return server_args, "it was switched off"
    if go.batching == "auto":
        from sglang.srt.configs.model_config import ModelConfig

        model = ModelConfig.from_server_args(server_args)
        kv = server_args.kv_cache_dtype  # auto, bfloat16, fp8_e4m3 and others
        kv_bytes = model.dtype.itemsize if kv == "auto" else 1 if kv.startswith("fp") else 2
        if why_not := token_batching.why_not(server_args, model.head_dim, kv_bytes, go.shared):
            return server_args, why_not
    try:
        return _server_args((*arguments, "--enable-mixed-chunk")), "SGLang does not mix with the engine's arguments"
    except ValueError as error:  # SGLang's speculation has no such steps
        return server_args, str(error)


def _steps(server: Mapping[str, Any]) -> Steps:
    """What the engine's schedulers have counted."""
    return Steps(*map(sum, zip(*(state["steps"] for state in _told(server)), strict=True)))


def _told(server: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each scheduler tells of its steps; [] without our hooks, as with --no-grouping."""
    return [state[STEPS_KEY] for state in server.get("internal_states", ()) if STEPS_KEY in state]


def _ready(context: int, server: Mapping[str, Any], unmixed: str) -> Ready:
    """Room for a prompt and its output, and what a step has."""
    told = _told(server)
    mixes = all(state["mixed"] for state in told) if told else server.get("enable_mixed_chunk")
    chunk = max((state["chunk"] for state in told), default=0)
    # SGLang rounds the prompt up to whole pages, and keeps one more page: what does not fit is cut or never admitted.
    rounded = 2 * (int(server.get("page_size") or 1) - 1)
    pool = int(server["max_total_num_tokens"]) - rounded
    strict = rounded > 0 and pool < context
    return Ready(min(context, pool) - _KEPT_BACK, strict, pool, chunk, "" if mixes else unmixed)


async def _serve(handlers: Handlers, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Task | None] = asyncio.Queue()
    threading.Thread(target=_read, args=(connection, loop, inbox), daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    requests = _Requests(handlers)
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

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
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
                outcome, told = await self._try(task)
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
                return Outcome(task.number, None, f"{told} {more}")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _try(self, task: Task) -> tuple[Outcome | None, str]:
        """What became of a request; None and SGLang's words if its queue was full."""
        self._tries += 1
        self._inside[task.number] = self._tries
        try:
            return Outcome(task.number, await self._handlers.run(task)), ""
        except RefusedError as error:
            told = str(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a cancellation inside SGLang, and a panic of its tokenizer
            told = f"the engine gave the request up: {reason(error)}"
        finally:
            del self._inside[task.number]
        return (None, told) if _QUEUE_FULL in told else (Outcome(task.number, None, told), "")
