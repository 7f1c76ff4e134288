"""The client of a live test: a server that fails, and the files of the report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sgl_prefix_attn.abtest.client import TESTS, Client, ServerRefusalError
from sgl_prefix_attn.abtest.live import write_report


class Server(ThreadingHTTPServer):
    """Answers every command by `answer`: method -> status, body. A status below zero: the body breaks off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.answer: Callable[[str], tuple[int, str]] = lambda method: (404, "")
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.command)
        status, body = self.server.answer(self.command)
        self.send_response(abs(status))
        self.send_header("Content-Length", str(len(body) + (1000 if status < 0 else 0)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_DELETE = do_GET

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "[" * 100_000), "no answer: maximum recursion depth exceeded"),
        ((-200, '{"copies": ['), "no answer: IncompleteRead"),
        ((-409, "it is"), "the server answered 409: "),
        ((200, "[]"), "no answer: list indices must be integers"),
    ],
)
def test_answers_that_are_none_are_named(answer: tuple[int, str], message: str, server: Server) -> None:
    server.answer = lambda method: answer
    with pytest.raises(ServerRefusalError, match=message):
        Client(server.url, TESTS).start({})


def test_reports_whose_names_differ_after_a_dot_are_files_of_their_own(tmp_path: Path) -> None:
    for name in ("llama-3.1", "llama-3.2"):
        write_report(tmp_path / name, "A/B test", [name], {"name": name}, b"picture")
    names = {f"llama-3.{n}.{ending}" for n in (1, 2) for ending in ("json", "png", "html")}
    assert {path.name for path in tmp_path.iterdir()} == names
    with pytest.raises(ValueError, match=r"--out \.: expected a name"):
        write_report(Path(), "A/B test", [], {}, b"")
