"""The client of a live test: a server that fails, and the file of the report."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.abtest import client, live
from sgl_prefix_attn.abtest.client import Client, ServerRefusalError
from sgl_prefix_attn.routing.live_plan import LivePlan
from tests.support.http_stub import answering


@dataclass
class Server:
    """Answers every command by `answer`: method -> status, body. A status below zero: the body breaks off."""

    asked: list[str] = field(default_factory=list)
    answer: Callable[[str], tuple[int, str]] = lambda method: (404, "")
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        made.asked.append(request.command)
        status, body = made.answer(request.command)
        return status, body.encode()

    with answering(answer) as made.url:
        yield made


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
        Client(server.url).start({})


PLAN = LivePlan(arms=("packed", "stock"), block_steps=8, warmup_steps=2, pairs=20)


def state(steps: int, status: str, first: int = 0, rows: int = 10_000) -> tuple[int, str]:
    copy = {"token": "t", "status": status, "steps_done": steps, "plan": PLAN.model_dump(), "first": first}
    end = min(steps, first + rows)
    return 200, json.dumps(
        {
            "copies": [
                {**copy, "us": [*range(first, end)], "requests": [10] * (end - first), "packed": [1] * (end - first)}
            ]
        }
    )


def test_rows_that_one_answer_does_not_hold_are_read_by_further_ones(server: Server) -> None:
    pages = [state(250, "stopped", first, 100) for first in (0, 100, 200)]
    answers = {"POST": [state(0, "running")], "DELETE": pages[:1], "GET": [state(250, "finished", 250), *pages[1:]]}
    server.answer = lambda method: answers[method].pop(0)
    (copy,) = live.run(Client(server.url), PLAN, 60.0)
    assert copy["us"] == [*range(250)]
    assert len(copy["requests"]) == len(copy["packed"]) == 250
    assert server.asked == ["POST", "GET", "DELETE", "GET", "GET"]


@pytest.mark.parametrize("lost", [0, 1, 3, 4])
def test_polls_that_are_lost_do_not_lose_the_test(lost, server, monkeypatch, capsys):
    """Three tries follow a lost poll. After them the test is stopped, and its steps are judged."""
    monkeypatch.setattr(client, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    answers = {"POST": [state(0, "running")], "DELETE": [(500, "busy"), state(250, "stopped")]}
    answers["GET"] = [*lost * [(500, '{"error": {"message": "transient"}}')], state(250, "finished")]
    server.answer = lambda method: answers[method].pop(0)
    (copy,) = live.run(Client(server.url), PLAN, 60.0)
    assert server.asked == ["POST", *["GET"] * min(lost + 1, 4), "DELETE", "DELETE"]
    assert len(copy["us"]) == 250
    told = "The test was stopped early, by an error: transient"
    assert (told in capsys.readouterr().out) == (lost == 4)


def test_a_server_that_never_answers_is_asked_within_one_timeout(server, monkeypatch):
    monkeypatch.setattr(client, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(client, "TIMEOUT_SECONDS", 0.3)
    answering = threading.Event()
    server.answer = lambda method: (answering.wait(30), (200, ""))[1]
    with pytest.raises(ServerRefusalError, match="no answer: timed out"):
        Client(server.url).read()
    answering.set()
    assert server.asked == ["GET"]


def test_ctrl_c_stops_the_test_and_reports(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(method: str) -> tuple[int, str]:
        if method == "GET":
            signal.raise_signal(signal.SIGINT)
        return state(250, "stopped" if method == "DELETE" else "running")

    server.answer = answer
    words = ["abtest", "live", server.url, "packed", "stock", "--pairs", "20", "--block", "8", "--warmup", "2"]
    assert main([*words, "--out", str(tmp_path / "ab.json")]) == 0
    assert server.asked[-1] == "DELETE"
    out = capsys.readouterr().out
    assert "The test was stopped early, by Ctrl-C" in out
    assert "No difference seen" in out
    assert json.loads((tmp_path / "ab.json").read_text())["verdict"]["pairs"] == 15
