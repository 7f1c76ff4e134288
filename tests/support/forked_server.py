"""Starts SGLang servers as forks of a process that has imported SGLang: a start takes 2 s of processor time, not 27.

Each of a server's processes imports SGLang for eight seconds or more. Here one process per environment imports it once,
loads no plug-in and starts no thread. The server is a fork of it, and so are the children that SGLang spawns, and
theirs: whoever asks multiprocessing for "spawn" gets its fork server.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from typing import Any, BinaryIO

import psutil

from sgl_prefix_attn.demo.server import ServerError, ServerProcess, start_process

# Not the modules by which plug-ins tell SGLang's processes apart: the scheduler's and the engine's.
COMMON_MODULES = (
    "sglang.launch_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.entrypoints.openai.serving_chat",
    "torch._inductor.compile_fx",
)
MODELS = "sglang.srt.models.registry"
# Some draft models of 0.5.23 import it, and with it the scheduler's. The registry leaves out what it cannot import.
NOT_FOR_MODELS = "sglang.srt.managers.tp_worker"
SERVER_MODULE = "sglang.launch_server"
MODULES = (  # programs that forks can become
    SERVER_MODULE, "tests.e2e.launchers", "tests.e2e.injected", "tests.pinning.arrangements",
    "tests.support.refused", "tests.offline.recorded", "tests.offline.killed_batch", "sgl_prefix_attn",
)  # fmt: skip
# Beginnings of variables.
NOT_READ_AT_IMPORT = (
    "PREFIXPACK_", "PYTEST_", "TEST_", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_HEALTH_", "SGLANG_TEST_RETRACT",
)  # fmt: skip
# Read when functions are declared. SGLang compiles some of theirs where there are several ranks.
AT_IMPORT = {"TORCHDYNAMO_DISABLE": "1"}
# A pool without a size takes most of the machine's free memory. One with a size is made smaller, or its server ends,
# where other processes take memory during the start.
POOL = "--max-total-tokens"
MAY_TAKE_ALL = ("--mem-fraction-static", "0.98")
HEALTHY = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # else /health sleeps for a second
POLL_SECONDS = 0.05


class Forked:
    """A server process; part of the interface of `subprocess.Popen`. Its exit status is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        return None if self._process.is_running() else 1

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(SERVER_MODULE, timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.send_signal(number)


def start(command: list[str], environment: Mapping[str, str], output: BinaryIO) -> ServerProcess:
    """Starts `python -m MODULE ...`, with one of MODULES as a fork; as `start_process`.

    Raises ValueError for a server whose pool has no size: it would take the memory of the tests beside it.
    """
    if command[2] == SERVER_MODULE:
        if POOL not in command:
            raise ValueError(f"give the server's pool a size, as {POOL} 16384: {command}")
        command = [*command, *MAY_TAKE_ALL]
    if command[1] != "-m" or command[2] not in MODULES or sys.platform != "linux" or sys.version_info >= (3, 14):
        return start_process(command, environment, output)
    read_at_import = {name: value for name, value in environment.items() if not name.startswith(NOT_READ_AT_IMPORT)}
    template = _template(tuple(sorted((read_at_import | AT_IMPORT).items())))
    request = {"module": command[2], "arguments": command[3:], "environment": dict(environment), "output": output.name}
    template.stdin.write(json.dumps(request) + "\n")
    template.stdin.flush()
    pid = template.stdout.readline()
    if not pid:
        raise ServerError("the process that servers are forked from has ended: see its traceback above")
    return Forked(int(pid))


def start_without_warm_up(command: list[str], environment: Mapping[str, str], output: BinaryIO) -> ServerProcess:
    """As `start`, for a server that is healthy at once. SGLang's warm-up sleeps for a second as well."""
    return start([*command, "--skip-server-warmup"], {**environment, **HEALTHY}, output)


@functools.cache
def _template(environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The process whose forks are servers. It ends with this one."""
    command = [sys.executable, "-m", "tests.support.forked_server"]
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a template, and counts the processor time of its servers as this process's children's."""
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


def _serve_forks() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what imports print
        for name in COMMON_MODULES:
            __import__(name)
        sys.modules[NOT_FOR_MODELS] = None  # type: ignore[assignment]
        __import__(MODELS)
        del sys.modules[NOT_FOR_MODELS]
        assert not {"sglang.srt.managers.scheduler", "sglang.srt.entrypoints.engine"} & sys.modules.keys()
        signal.signal(signal.SIGCHLD, _reap)
        while request := sys.stdin.readline():
            pid = os.fork()
            if pid == 0:
                _become_server(**json.loads(request))
            print(pid, file=answers, flush=True)


def _reap(*signal_and_frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _become_server(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    log, nothing = os.open(output, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdin = os.fdopen(0, closefd=False)
    status = 1
    try:
        _spawn_by_forks()
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _spawn_by_forks() -> None:
    """Makes a fork of this process the fork server of multiprocessing, whatever start method is asked for.

    Children get the environment that the server has when it starts them, and have a fork server of their own.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux chooses an address without a file
    listener.listen()
    variables = os.memfd_create("environment")
    alive, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _serve_children(listener.fileno(), alive, variables)
        os._exit(0)
    os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = listener.getsockname(), ours, pid
    listener.close()
    connect = server.connect_to_new_process

    def connect_with_environment(*arguments: Any) -> Any:
        content = json.dumps(dict(os.environ)).encode()
        os.ftruncate(variables, os.pwrite(variables, content, 0))
        return connect(*arguments)

    vars(forkserver)["connect_to_new_process"] = connect_with_environment
    contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"]
    multiprocessing.set_start_method("forkserver", force=True)


def _serve_children(listener: int, alive: int, variables: int) -> None:
    """The loop of the fork server. `variables` is a file with the environment of the next child."""
    run: Any = forkserver.spawn._main  # type: ignore[attr-defined]

    def run_child(*arguments: Any) -> Any:
        os.environ.update(json.loads(os.pread(variables, os.fstat(variables).st_size, 0)))
        forkserver.spawn._main = run  # type: ignore[attr-defined]
        _spawn_by_forks()
        return run(*arguments)

    forkserver.spawn._main = run_child  # type: ignore[attr-defined]
    forkserver.main(listener, alive, [])


if __name__ == "__main__":
    _serve_forks()
