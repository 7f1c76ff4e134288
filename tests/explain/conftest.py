"""A small local server that answers GET /server_info as SGLang does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.explain import server as server_module

RECORDED = Path(__file__).parent / "data" / "server_info.json"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_TIMEOUT_SECONDS", 120.0)


Answers = dict[str, tuple[int, bytes]]


@pytest.fixture
def server_info() -> dict[str, Any]:
    """An answer recorded from a server with prefixpack; see data/README.md."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """serve({path: (status, body)}) -> URL; with api_key, requests without it get 401."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers, api_key: str | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answers.get(self.path, (404, b'{"detail":"Not Found"}'))
                if api_key and self.headers.get("Authorization") != f"Bearer {api_key}":
                    status, body = 401, b'{"error":"Unauthorized"}'
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
