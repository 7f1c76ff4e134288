"""Runs the real SGLang server as a subprocess for the length of a `with` block."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import psutil

PORTS = range(20_000, 30_000)
POLL_SECONDS = 0.25
MOVED_CPU_SECONDS = 1.0
STOP_SECONDS = 8.0
ERROR_LINES = 40


class ServerError(RuntimeError):
    """The server did not start, or answered with an error. The message ends with the relevant part of its log."""


class ServerProcess(Protocol):
    """The part of `subprocess.Popen` that a server needs. The process leads a session of its own."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


Starter = Callable[[list[str], Mapping[str, str], BinaryIO], ServerProcess]


def start_process(command: list[str], environment: Mapping[str, str], output: BinaryIO) -> ServerProcess:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """What to launch.

    model: folder or name, as SGLang takes it. backend: `--attention-backend`; None leaves the choice to SGLang.
    extra: more arguments for `sglang.launch_server`. environment: variables added to this process's.
    start_seconds: how long the server may take until it is healthy, while it moves (`Progress`). stall_seconds: how
    long it may stand still meanwhile. starter: how to start the process.
    """

    model: str
    backend: str | None
    device: str = "cpu"
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start_seconds: float = 3600.0
    log_folder: Path | None = None
    starter: Starter = start_process
    stall_seconds: float = 300.0

    def command(self, port: int, nccl_port: int | None = None) -> list[str]:
        """Arguments of the process; without `nccl_port` SGLang takes one for its ranks to meet on."""
        arguments = ["--model-path", self.model, "--device", self.device, "--skip-tokenizer-init"]
        arguments += ["--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--attention-backend", self.backend] if self.backend else []
        if self.device == "cpu":
            arguments += ["--dtype", "float32", "--disable-cuda-graph", "--grammar-backend", "none"]
            # An idle scheduler polls as fast as it can, which a second server on the same cores would feel.
            arguments += ["--sleep-on-idle"]
        arguments += ["--nccl-port", str(nccl_port)] if nccl_port is not None else []
        return [sys.executable, "-m", "sglang.launch_server", *arguments, *self.extra]

    def full_environment(self) -> dict[str, str]:
        variables = dict(os.environ)
        if self.device == "cpu":
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
            # The tiny model's matrices are too small to share; threads only wait for each other.
            variables.setdefault("OMP_NUM_THREADS", "1")
        return variables | dict(self.environment)


class Progress:
    """Whether a process and its descendants move: their log grows, one of them ends, or they use processor time."""

    def __init__(self, process: ServerProcess, log: Path) -> None:
        self._process, self._log = process, log
        self._size, self._cpu = 0, 0.0
        self._moved = self._looked = time.monotonic()

    def still_seconds(self, interval: float = 2.0) -> float:
        """Seconds since the last move.

        It looks at the processes every `interval` seconds only, as there may be many.
        """
        now = time.monotonic()
        if now - self._looked >= interval:
            self._looked = now
            size, cpu = self._log.stat().st_size, sum(map(_cpu_seconds, _family(self._process)))
            if size != self._size or not self._cpu <= cpu < self._cpu + MOVED_CPU_SECONDS:
                self._size, self._cpu, self._moved = size, cpu, now
        return now - self._moved


class Server:
    """A running server. Use `serve` to get one."""

    def __init__(self, options: ServerOptions, port: int, process: ServerProcess, log: Path) -> None:
        self.options = options
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = log

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def failure(self, what: str) -> ServerError:
        """An error that says `what` happened and shows the relevant part of the log."""
        return ServerError(f"{what}\n{log_tail(self.log)}")

    def get(self, path: str, timeout: float = 300.0) -> str:
        """Body of `GET path`. Raises ServerError when the server is gone or answers with an error status."""
        return self._fetch(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: object, timeout: float = 300.0) -> str:
        """Body of the answer to `POST path` with `body` as JSON. Raises ServerError as `get` does."""
        headers = {"Content-Type": "application/json"}
        return self._fetch(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers), timeout)

    def info(self) -> dict[str, Any]:
        """`GET /server_info`: arguments in force and the state of each scheduler."""
        return dict(json.loads(self.get("/server_info")))

    def packing_state(self) -> dict[str, Any] | None:
        """What the prefixpack backend reports about itself, or None where another backend serves."""
        return next((state["prefixpack"] for state in self.info()["internal_states"] if "prefixpack" in state), None)

    def flush_cache(self, still_seconds: float = 30.0) -> None:
        """Empty the prefix cache, waiting for running requests. Raises ServerError when the server stands still."""
        progress = Progress(self.process, self.log)
        while True:
            try:
                self.post("/flush_cache", {})
                return
            except ServerError:  # SGLang refuses while it works on a request
                if progress.still_seconds() > still_seconds:
                    raise
                time.sleep(POLL_SECONDS)

    def _fetch(self, request: urllib.request.Request, timeout: float) -> str:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")
            raise ServerError(f"{request.full_url} answered {error.code}: {detail}") from error
        except OSError as error:
            raise self.failure(f"{request.full_url}: {error}") from error


@contextlib.contextmanager
def serve(options: ServerOptions, on_wait: Callable[[float], None] | None = None) -> Iterator[Server]:
    """Launch a server on a free loopback port, yield it once healthy, and stop its whole process tree at the end.

    `on_wait` is called with the seconds waited so far while the server starts. Raises ServerError when the process ends
    or stands still for `options.stall_seconds`, or is not healthy within `options.start_seconds`. The log file is kept
    when something failed, else removed.
    Should this process be killed, its servers are killed too.
    """
    log = _new_log(options)
    port = free_port()
    with log.open("wb") as output:
        # Data-parallel copies meet on a port each, and take one given for the same.
        nccl_port = None if "--dp-size" in options.extra else free_port()
        process = options.starter(options.command(port, nccl_port), options.full_environment(), output)
    with _killed_with_us(process):
        server = Server(options, port, process, log)
        try:
            _wait_until_healthy(server, on_wait or (lambda seconds: None))
            yield server
        finally:
            stop(process)
    if options.log_folder is None:
        log.unlink(missing_ok=True)


def stop(process: ServerProcess) -> None:
    """End a server and everything it started: first as Ctrl-C does, then by force."""
    family = _family(process)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    left = {*family, *_family(process)}
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    deadline = time.monotonic() + STOP_SECONDS
    while any(map(_runs, left)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    """Whether a process has not ended. Orphans may stay zombies for seconds, until a container's init gets to them."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on now.

    SGLang takes its ports half a minute after it was told of them: these are from a range out of which Linux, unless
    told otherwise, gives none to whoever asks for any.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no unused port among 100 between {PORTS.start} and {PORTS.stop}")


def log_tail(log: Path, lines: int = ERROR_LINES) -> str:
    """The parts of a server's log that say why it ended: its last traceback and its last lines."""
    text = log.read_text(errors="replace").splitlines()
    end = max(0, len(text) - lines)
    starts = [number for number, line in enumerate(text[:end]) if "Traceback (most recent call last)" in line]
    traceback = text[starts[-1] : min(starts[-1] + lines, end)] if starts else []
    return "\n".join([f"--- {log} ---", *traceback, *(["..."] if traceback else []), *text[end:]])


@contextlib.contextmanager
def _killed_with_us(process: ServerProcess) -> Iterator[None]:
    """Have a bystander kill the process's group when this process ends without cleaning up.

    It waits for the end of a pipe whose other end only this process has.
    """
    script = 'cat >/dev/null; kill -9 "-$0"'
    with subprocess.Popen(
        ["/bin/sh", "-c", script, str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as bystander:
        try:
            yield
        finally:
            bystander.kill()


def _new_log(options: ServerOptions) -> Path:
    if options.log_folder is not None:
        options.log_folder.mkdir(parents=True, exist_ok=True)
    prefix = f"sglang-{options.backend or 'default'}-"
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=".log", dir=options.log_folder)
    os.close(handle)
    return Path(name)


def _wait_until_healthy(server: Server, on_wait: Callable[[float], None]) -> None:
    started, options, progress = time.monotonic(), server.options, Progress(server.process, server.log)
    while True:
        waited = time.monotonic() - started
        on_wait(waited)
        status = server.process.poll()
        if status is not None:
            raise server.failure(f"the server ended with status {status} before it was healthy")
        with contextlib.suppress(ServerError):
            server.get("/health", timeout=20.0)  # SGLang may run a request for it
            return
        still = progress.still_seconds(min(2.0, options.stall_seconds))
        if still > options.stall_seconds:
            raise server.failure(
                f"the server stands still: for {still:.0f} s no line in its log and next to no processor time; "
                f"it was started {waited:.0f} s ago"
            )
        if waited > options.start_seconds:
            raise server.failure(
                f"the server was not healthy after {waited:.0f} s, but still starting; "
                "on a busy machine --start-seconds gives it more"
            )
        time.sleep(POLL_SECONDS)


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process and of its children that have ended."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.Error:
        return 0.0


def _family(process: ServerProcess) -> list[psutil.Process]:
    """The process, its descendants, and orphans of its session (SGLang's schedulers outlive a killed parent)."""
    members = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        members = {member.pid: member for member in [parent, *parent.children(recursive=True)]}
    for candidate in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(candidate.pid) == process.pid:
                members[candidate.pid] = candidate
    return list(members.values())
