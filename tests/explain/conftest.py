"""A local server that answers GET /server_info as SGLang does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.explain import server as server_module
from tests.support.http_stub import answering

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
    with ExitStack() as stack:

        def start(answers: Answers, api_key: str | None = None) -> str:
            def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
                status, content = answers.get(request.path, (404, {"detail": "Not Found"}))
                if api_key and request.headers.get("Authorization") != f"Bearer {api_key}":
                    status, content = 401, {"error": "Unauthorized"}
                return status, content if isinstance(content, bytes) else json.dumps(content).encode()

            return stack.enter_context(answering(answer))

        yield start
