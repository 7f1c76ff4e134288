"""HTTP servers of this process that answer as a test says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that sends a status and a body for each request. A status below zero: the body breaks."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self)
            with contextlib.suppress(ConnectionError):  # the client has left
                self.send_response(abs(status))
                self.send_header("Content-Length", str(len(body) + (1000 if status < 0 else 0)))
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
