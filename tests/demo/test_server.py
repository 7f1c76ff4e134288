"""The server launcher with stand-ins for SGLang: failures show the log, and no process is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sgl_prefix_attn.demo.server import Server, ServerError, ServerOptions, log_tail, serve

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 418)
        self.end_headers()
        self.wfile.write(b"answer")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class StandIn(ServerOptions):
    """Runs `model` as Python code instead of SGLang."""

    def command(self, port: int, nccl_port: int | None = None) -> list[str]:
        return [sys.executable, "-c", self.model, str(port)]


def processes_of(server: Server) -> list[psutil.Process]:
    """The server and its child."""
    return [psutil.Process(server.process.pid), psutil.Process(int(server.log_text().split()[1]))]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_process_tree_ends_with_the_block(tmp_path: Path, error: type[Exception] | None) -> None:
    with contextlib.suppress(ZeroDivisionError), serve(StandIn(HEALTHY, None, log_folder=tmp_path)) as server:
        assert server.get("/health") == "answer"
        with pytest.raises(ServerError, match="418: answer"):
            server.get("/tea")
        tree = processes_of(server)
        assert all(process.is_running() for process in tree)
        if error is not None:
            raise error
    assert psutil.wait_procs(tree, timeout=60)[1] == []
    assert server.log.exists()


def test_the_process_tree_ends_when_its_owner_is_killed() -> None:
    owner = """
import time
from tests.demo.test_server import HEALTHY, StandIn, processes_of, serve
with serve(StandIn(HEALTHY, None)) as server:
    print(*[process.pid for process in processes_of(server)], flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as killed:
        orphans = [psutil.Process(int(pid)) for pid in killed.stdout.readline().split()]
        killed.kill()
    assert len(orphans) == 2
    assert psutil.wait_procs(orphans, timeout=60)[1] == []


def test_the_log_is_removed_unless_a_folder_is_given() -> None:
    with serve(StandIn(HEALTHY, None)) as server:
        assert server.log.exists()
    assert not server.log.exists()


def test_a_server_that_ends_early_is_an_error_with_its_log(tmp_path: Path) -> None:
    code = "print('reading weights', flush=True); raise SystemExit('no such model')"
    with (
        pytest.raises(ServerError, match=r"status 1(.|\n)*reading weights(.|\n)*no such model"),
        serve(StandIn(code, None, log_folder=tmp_path)),
    ):
        pass


def test_a_server_that_stands_still_is_an_error_with_its_log(tmp_path: Path) -> None:
    waited: list[float] = []
    code = "import time; print('thinking', flush=True); time.sleep(600)"
    options = StandIn(code, None, stall_seconds=1.0, log_folder=tmp_path)

    def wait_for_log(seconds: float) -> None:
        waited.append(seconds)
        deadline = time.monotonic() + 60
        while not any(log.stat().st_size for log in tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)

    with pytest.raises(ServerError, match=r"stands still(.|\n)*thinking"), serve(options, wait_for_log):
        pass
    assert waited == sorted(waited)
    assert waited[-1] > 1.0


LOGS = "print('loading', flush=True); time.sleep(0.2)"
COMPUTES = "subprocess.run([sys.executable, '-c', 'sum(range(10**6))'])"


@pytest.mark.parametrize("moves", [LOGS, COMPUTES])
def test_a_server_that_moves_may_take_longer(moves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a start takes many minutes, with lines in the log or processor time in some process."""
    monkeypatch.setattr("sgl_prefix_attn.demo.server.MOVED_CPU_SECONDS", 0.01)
    slow = f"import subprocess, sys, time; end = time.time() + 4\nwhile time.time() < end: {moves}\n"
    with serve(StandIn(slow + HEALTHY, None, stall_seconds=2.5, log_folder=tmp_path)) as server:
        assert server.get("/health") == "answer"


def test_the_whole_time_is_bounded_too(tmp_path: Path) -> None:
    options = StandIn(f"import time\nwhile True: {LOGS}", None, start_seconds=1.0, log_folder=tmp_path)
    with pytest.raises(ServerError, match=r"but still starting; .* --start-seconds"), serve(options):
        pass


def test_the_tail_of_a_log_begins_with_its_last_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\nTraceback (most recent call last):\n  cause\n" + "later\n" * 100 + "end\n")
    shown = log_tail(log, lines=3).splitlines()
    assert shown[1:] == ["Traceback (most recent call last):", "  cause", "later", "...", "later", "later", "end"]
