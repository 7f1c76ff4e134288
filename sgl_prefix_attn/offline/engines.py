"""Engines in processes of their own, and the messages to and from them.

The process runs `main(connection, arguments)`: it takes `Line`s, sends what it has `Checked` of them, and waits for
`Go`. Then it sends what each of the rest means, some at a time, while the model loads, and `Ready`. From then on it
takes `Task`s and sends an `Outcome` for each, in whatever order they end, until it gets None, which it may get earlier.
After it has been `Ready` it sends `Steps` before it ends.
Should this process die, the engines die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from sgl_prefix_attn.offline.messages import (
    Checked,
    Go,
    Line,
    Outcome,
    Planned,
    Ready,
    Refused,
    Steps,
    Task,
    Unusable,
    together,
)

_STOP_SECONDS = 10.0
_LOG_LINES = 30


@dataclass(frozen=True)
class EngineArguments:
    """An engine to start.

    Attributes:
        arguments: as for `python -m sglang.launch_server`.
        environment: variables to add.
        log: file for the engine's output; None: the output of this process.
        keep_log: whether the log's folder stays when the machine's last process with it ends (Ray).
    """

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    log: Path | None = None
    keep_log: bool = True


EngineMain = Callable[[Connection, EngineArguments], None]


class Engines(Protocol):
    """Running engines. A context manager; leaving it ends them."""

    def __enter__(self) -> Engines: ...

    def __exit__(self, *exception: object) -> None: ...

    def __len__(self) -> int: ...

    def check(self, lines: Sequence[Line]) -> Checked:
        """Divides lines over the engines and checks them before a model loads; to be called first.

        Raises:
            ValueError: SGLang does not take the engines' arguments.
            EngineError: an engine is gone.
        """

    def plan(self, go: Go) -> Iterator[Planned | Refused]:
        """Lets the models load, and says meanwhile what each line means that was not refused."""

    def wait_ready(self) -> list[Ready]:
        """Waits until every engine takes requests. Raises EngineError when one does not start."""

    def outstanding(self, engine: int) -> int:
        """Tasks of an engine whose outcome has not come yet."""

    def submit(self, engine: int, task: Task) -> None:
        """Raises EngineError when the engine is gone; `outcomes` can raise it too."""

    def outcomes(self, timeout: float) -> list[Outcome]:
        """What has come, after waiting for at most `timeout` seconds.

        Raises EngineError when an engine is gone and nothing has come: what others, or it itself, had finished is
        returned first.
        """

    def finish(self) -> list[Steps]:
        """Ends the engines, which have nothing left to do; what those have counted that say so in time."""


class EngineError(RuntimeError):
    """An engine process ended or failed to start. The message ends with the tail of its log."""


@dataclass
class _Engine:
    process: Any
    connection: Connection
    arguments: EngineArguments
    ready: Ready | None = None
    to_plan: int = 0
    outstanding: set[int] = field(default_factory=set)


StartEngines = Callable[[EngineMain, Sequence[EngineArguments]], Engines]


class EnginePool:
    """Runs engines on this machine. They start at once and load while the caller does other work.

    Args:
        main: what an engine's process runs; has to be importable there.
        engines: what to start, one entry for each.
    """

    def __init__(self, main: EngineMain, engines: Sequence[EngineArguments]) -> None:
        context = multiprocessing.get_context("spawn")
        self._engines: list[_Engine] = []
        for log in {arguments.log for arguments in engines if arguments.log is not None}:
            log.unlink(missing_ok=True)  # of an earlier run
        resource_tracker.ensure_running()  # else the first start does it, which unblocks SIGINT
        with contextlib.ExitStack() as unless_all_start:
            unless_all_start.push(self)
            for arguments in engines:
                ours, theirs = context.Pipe()
                process = context.Process(target=_engine_process, args=(main, theirs, arguments))
                # Ctrl-C would end the child with a traceback before it ignores the signal; it inherits the mask.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    process.start()
                    self._engines.append(_Engine(process, ours, arguments))
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                theirs.close()
            unless_all_start.pop_all()

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *exception: object) -> None:
        for engine in self._engines:
            with contextlib.suppress(OSError):
                engine.connection.send(None)
        for engine in self._engines:
            engine.process.join(0 if any(exception) else _STOP_SECONDS)
            if engine.process.is_alive():
                engine.process.kill()
                engine.process.join()
            engine.connection.close()

    def __len__(self) -> int:
        return len(self._engines)

    def check(self, lines: Sequence[Line]) -> Checked:
        parts = [lines[number :: len(self)] for number in range(len(self))]
        for engine, part in zip(self._engines, parts, strict=True):
            self._send(engine, part)
        answers: list[Checked] = []
        for engine, part in zip(self._engines, parts, strict=True):
            answer = self._receive(engine)
            if isinstance(answer, Unusable):
                raise ValueError(answer.reason)
            engine.to_plan = len(part) - len(answer.refused)
            answers.append(answer)
        return together(answers)

    def plan(self, go: Go) -> Iterator[Planned | Refused]:
        for engine in self._engines:
            self._send(engine, go)
        while left := {engine.connection: engine for engine in self._engines if engine.to_plan}:
            for connection in wait(list(left)):
                engine = left[connection]  # type: ignore[index]
                part = self._receive(engine)
                engine.to_plan -= len(part)
                yield from part

    def wait_ready(self) -> list[Ready]:
        for engine in self._engines:
            if engine.ready is None:
                engine.ready = self._receive(engine)
        return [engine.ready for engine in self._engines if engine.ready is not None]

    def outstanding(self, engine: int) -> int:
        return len(self._engines[engine].outstanding)

    def submit(self, engine: int, task: Task) -> None:
        self._send(self._engines[engine], task)
        self._engines[engine].outstanding.add(task.number)

    def outcomes(self, timeout: float) -> list[Outcome]:
        by_connection: dict[Any, _Engine] = {e.connection: e for e in self._engines if e.outstanding}
        outcomes: list[Outcome] = []
        gone = None
        for connection in wait(list(by_connection), timeout):
            try:
                self._drain(by_connection[connection], outcomes)
            except EngineError as error:  # the pipe stays closed, so the next call raises again
                gone = error
        if gone is not None and not outcomes:
            raise gone
        return outcomes

    def finish(self) -> list[Steps]:
        steps = []
        for engine in self._engines:
            with contextlib.suppress(EngineError):  # all results are there
                self._send(engine, None)
                if engine.connection.poll(_STOP_SECONDS):
                    steps.append(self._receive(engine))
        return steps

    def _drain(self, engine: _Engine, outcomes: list[Outcome]) -> None:
        """Adds what an engine has sent. Requires that something has arrived."""
        while True:
            outcome: Outcome = self._receive(engine)
            engine.outstanding.discard(outcome.number)
            outcomes.append(outcome)
            if not engine.connection.poll():
                return

    def _send(self, engine: _Engine, message: Any) -> None:
        try:
            engine.connection.send(message)
        except OSError as error:
            raise self._gone(engine) from error

    def _receive(self, engine: _Engine) -> Any:
        try:
            return engine.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(engine) from error

    def _gone(self, engine: _Engine) -> EngineError:
        engine.process.join(_STOP_SECONDS)
        number = self._engines.index(engine)
        tail = []
        if engine.arguments.log is not None and engine.arguments.log.exists():
            tail = engine.arguments.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return EngineError(
            "\n".join([f"engine {number} ended with status {engine.process.exitcode}; its log ends with:", *tail])
        )


def _engine_process(main: EngineMain, connection: Connection, arguments: EngineArguments) -> None:
    die_with_parent()
    take_descendants_along()
    # Ctrl-C reaches the whole foreground group; the parent tells its engines what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(dict(arguments.environment))
    if arguments.log is not None:
        log = os.open(arguments.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    main(connection, arguments)


def die_with_parent() -> None:
    """This process, a child of multiprocessing, is killed as soon as the one that started it is gone (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it ended before the call
        os._exit(1)


def take_descendants_along() -> None:
    """Arranges that the processes started by this one are killed when it ends, for any reason.

    SGLang's ask the kernel for that themselves, but only once they have imported SGLang: one whose parent is killed
    before would stay, with its memory. So they form a process group, which a small process outside of it kills when
    this one's end of a pipe closes. To be called before there are threads.
    """
    os.setpgid(0, 0)
    group = os.getpid()
    closed, held = os.pipe()  # started programs inherit neither end
    if os.fork() != 0:
        os.close(closed)
        return
    os.setsid()
    os.close(held)
    with contextlib.suppress(OSError):
        os.read(closed, 1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(0)
