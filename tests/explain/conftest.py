"""A local server that answers GET /server_info as SGLang does."""

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
Answers = dict[str, tuple[int, Any]]


@pytest.fixture
def server_info() -> dict[str, Any]:
    """An answer recorded from a server with prefixpack; see data/README.md."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """serve({path: (status, JSON value or bytes)}) -> URL. With api_key, requests without it get 401."""
    monkeypatch.setattr(server_module, "_TIMEOUT_SECONDS", 120.0)  # a loaded machine answers late
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers, api_key: str | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, content = answers.get(self.path, (404, {"detail": "Not Found"}))
                if api_key and self.headers.get("Authorization") != f"Bearer {api_key}":
                    status, content = 401, {"error": "Unauthorized"}
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
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
