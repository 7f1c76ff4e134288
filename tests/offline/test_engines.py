"""An engine's process takes the processes it has started along, whatever it dies of; what it had finished stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from sgl_prefix_attn.offline.engines import EngineArguments, EngineError, EnginePool
from sgl_prefix_attn.offline.messages import Checked, Go, Line, Outcome, Planned, Ready, Refused, Steps, Task, Unusable
from tests.offline import fake_engine

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
    connection.send(Outcome(first.number, fake_engine.answer([1], [])))


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
        pool.submit(0, Task(7, "", b""))
        pool.submit(0, Task(8, "", b""))
        while multiprocessing.active_children():
            time.sleep(0.01)
        time.sleep(0.5)  # the pipe closes a moment later, with what looks after the engine's processes
        assert [outcome.number for outcome in pool.outcomes(SECONDS)] == [7]
        with pytest.raises(EngineError, match="engine 0 ended with status 0"):
            pool.outcomes(SECONDS)


def plans(connection: Connection, arguments: EngineArguments) -> None:
    """An engine that refuses the first of its lines, and plans the others one by one."""
    first, *others = connection.recv()
    connection.send(Checked([Refused(first.number, "invalid_request", "no")], {"extra": 1}))
    assert connection.recv() == Go("on", 0.5)
    for line in others:
        connection.send([Planned(line.number, None, 1, 0, 1)])
    connection.send(Ready(room=len(others)))
    connection.recv()
    if len(others) == 3:
        connection.send(Steps(7, 70, 2))


def test_lines_are_divided_checked_and_planned_before_engines_are_ready() -> None:
    with EnginePool(plans, [EngineArguments(())] * 2) as pool:
        checked = pool.check([Line(number, "", b"") for number in range(7)])
        assert [refused.number for refused in checked.refused] == [0, 1]
        assert checked.ignored == {"extra": 2}
        assert sorted(planned.number for planned in pool.plan(Go("on", 0.5))) == [2, 3, 4, 5, 6]
        assert [ready.room for ready in pool.wait_ready()] == [3, 2]
        assert pool.finish() == [Steps(7, 70, 2)]  # the other engine has ended without a word


def refuses_its_arguments(connection: Connection, arguments: EngineArguments) -> None:
    connection.recv()
    connection.send(Unusable("--server-args: no such thing"))


def test_arguments_that_an_engine_does_not_take_are_no_failure_of_the_engine() -> None:
    with (
        EnginePool(refuses_its_arguments, [EngineArguments(())]) as pool,
        pytest.raises(ValueError, match="no such thing"),
    ):
        pool.check([Line(0, "", b"")])
