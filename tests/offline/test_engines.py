"""An engine's process takes the processes it has started along, whatever it dies of; what it had finished stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from sgl_prefix_attn.offline.answers import Answer
from sgl_prefix_attn.offline.engines import EngineArguments, EngineError, EnginePool, Outcome, Ready, Task

SECONDS = 60


def sleeper(connection: Connection, arguments: EngineArguments) -> None:
    """An engine with a child that, like SGLang's while they start, does not look after its parent."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    connection.send(Ready(room=child.pid))
    connection.recv()


def test_a_killed_engine_leaves_no_process() -> None:
    with EnginePool(sleeper, [EngineArguments(())]) as pool:
        (ready,) = pool.wait_ready()
        child = psutil.Process(ready.room)
        os.kill(child.ppid(), signal.SIGKILL)
        _, alive = psutil.wait_procs([child], timeout=SECONDS)
        assert not alive


def one_answer(connection: Connection, arguments: EngineArguments) -> None:
    """An engine that takes two requests and is gone after the first."""
    connection.send(Ready(room=0))
    first, _ = connection.recv(), connection.recv()
    connection.send(Outcome(first.number, Answer((), 1)))


def prints(connection: Connection, arguments: EngineArguments) -> None:
    print("of this run", flush=True)
    connection.send(Ready(room=0))
    connection.recv()


def test_the_log_is_of_this_run_alone(tmp_path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    with EnginePool(prints, [EngineArguments((), log=log)] * 2) as pool:
        pool.wait_ready()
    assert log.read_text() == "of this run\n" * 2


def test_what_an_engine_finished_before_it_was_gone_is_returned_first() -> None:
    with EnginePool(one_answer, [EngineArguments(())]) as pool:
        pool.wait_ready()
        pool.submit(0, Task(7, np.array([1], dtype=np.int32), {}))
        pool.submit(0, Task(8, np.array([1], dtype=np.int32), {}))
        while multiprocessing.active_children():
            time.sleep(0.01)
        time.sleep(0.5)  # the pipe closes a moment later, with what looks after the engine's processes
        assert [outcome.number for outcome in pool.outcomes(SECONDS)] == [7]
        with pytest.raises(EngineError, match="engine 0 ended with status 0"):
            pool.outcomes(SECONDS)
