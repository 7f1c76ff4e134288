"""An engine's process takes the processes that it has started along, whatever it dies of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

import psutil

from sgl_prefix_attn.offline.engines import EngineArguments, EnginePool, Ready

SECONDS = 20


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


def test_an_engine_that_ends_leaves_no_process() -> None:
    with EnginePool(sleeper, [EngineArguments(())]) as pool:
        (ready,) = pool.wait_ready()
        child = psutil.Process(ready.room)
    _, alive = psutil.wait_procs([child], timeout=SECONDS)
    assert not alive
