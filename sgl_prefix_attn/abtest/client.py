"""Commands to a server's endpoint of live tests."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from tqdm import tqdm

RETRY_SECONDS = (0.5, 2.0, 5.0)  # before each further try
TIMEOUT_SECONDS = 60.0  # of all tries together
PATH = "/prefixpack/abtest"


class ServerRefusalError(ValueError):
    """The server refused a command, or does not answer: the message says why."""


class NoAnswerError(ServerRefusalError):
    """No answer, or one of a server that failed: the same command may succeed a little later."""


class StepBar(tqdm):
    """Progress in decode steps of a server. It says so when no step runs: a server without requests has none."""

    IDLE_SECONDS = 5.0

    def __init__(self, total: int, what: str) -> None:
        super().__init__(total=total, desc=what, unit="step")
        self._moved = time.monotonic()

    def reach(self, done: int) -> None:
        """Shows how many steps are done."""
        if done > self.n:
            self._moved = time.monotonic()
            self.set_postfix_str("", refresh=False)
        elif time.monotonic() - self._moved > self.IDLE_SECONDS:
            self.set_postfix_str("no decode step runs: send requests to the server")
        self.update(done - self.n)


class Client:
    """Commands to the endpoint of a server.

    Args:
        url: of the server, for example http://127.0.0.1:30000.
        api_key: SGLang's admin key, where the server has one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ServerRefusalError(f"server {url!r}: expected http://HOST:PORT")
        self.url = url.rstrip("/") + PATH
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._token = ""

    def start(self, plan: dict[str, Any]) -> list[dict[str, Any]]:
        """The state of each data-parallel copy. Later commands are for what this one has started."""
        copies = self._ask("POST", self.url, plan)
        self._token = next((f"&token={copy['token']}" for copy in copies if "token" in copy), "")
        return copies

    def read(self, first: int = 0) -> list[dict[str, Any]]:
        """The state and rows of each copy, from `first` on; renews the lease."""
        return self._ask_again("GET", f"{self.url}?first={first}{self._token}")

    def stop(self) -> list[dict[str, Any]]:
        """The last state of each copy."""
        return self._ask_again("DELETE", f"{self.url}?{self._token}")

    def complete(self, copies: list[dict[str, Any]], columns: Sequence[str]) -> None:
        """Reads the rows that an answer lacks, one answer after the other, and appends their columns.

        Steps may go on meanwhile: rows until those of the answer's moment are read.

        Raises:
            ServerRefusalError: rows are gone.
        """
        for index, copy in enumerate(copies):
            while (end := copy["first"] + len(copy["us"])) < copy["steps_done"]:
                more = self.read(end)[index]
                if more["first"] != end or not more["us"]:
                    raise ServerRefusalError("the server no longer has the rows of this test")
                for column in columns:
                    copy[column] += more[column]

    def _ask_again(self, method: str, url: str) -> list[dict[str, Any]]:
        """A command that the server may get twice. One lost answer does not end what runs."""
        end = time.monotonic() + TIMEOUT_SECONDS
        for seconds in RETRY_SECONDS:
            try:
                return self._ask(method, url, timeout=end - time.monotonic())
            except NoAnswerError:
                if time.monotonic() + seconds >= end:
                    raise
                time.sleep(seconds)
        return self._ask(method, url, timeout=end - time.monotonic())

    def _ask(
        self, method: str, url: str, body: object = None, timeout: float = TIMEOUT_SECONDS
    ) -> list[dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return list(json.load(response)["copies"])
        except urllib.error.HTTPError as error:
            kind = NoAnswerError if error.code >= 500 else ServerRefusalError
            raise kind(_refusal(error)) from error
        except (HTTPException, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise NoAnswerError(f"{self.url}: no answer: {error}") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode(errors="replace")
    except (HTTPException, OSError):  # the connection broke
        text = ""
    if error.code == 404 and "kind" not in text:
        return "the server has no endpoint for live tests: start it with PREFIXPACK_LIVE_TESTS=1"
    if error.code in (401, 403):
        return "the server asks for its admin key: give --api-key"
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}: {text[:300]}"
