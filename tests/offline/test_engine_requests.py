"""Every request that SGLang's engine is given has an outcome, whatever the engine makes of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sgl_prefix_attn.offline import engine_process
from sgl_prefix_attn.offline.answers import Answer
from sgl_prefix_attn.offline.batch_file import CHAT
from sgl_prefix_attn.offline.messages import Line, Outcome, Planned, Refused, Task
from sgl_prefix_attn.offline.sglang_requests import Handlers, RefusedError

FULL = RefusedError("The request queue is full.")
ANSWER = Answer({}, 1, 1)


class Panic(BaseException):
    """As a tokenizer in Rust raises it."""


class GivesUp:
    """Handlers that end every request with this exception."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def run(self, task: Task) -> Answer:
        raise self._error


class SmallQueue:
    """Handlers whose engine's queue has room for that many requests; one takes a moment."""

    def __init__(self, room: int) -> None:
        self._room, self._queued = room, 0

    async def run(self, task: Task) -> Answer:
        if self._queued == self._room:
            raise FULL
        self._queued += 1
        await asyncio.sleep(0.01)
        self._queued -= 1
        return ANSWER


class NeverHasRoom(SmallQueue):
    """The queue refuses everything, after a moment."""

    async def run(self, task: Task) -> Answer:
        await asyncio.sleep(0.002)
        raise FULL


def outcomes(handlers: Any, count: int = 1) -> list[Outcome]:
    async def serve() -> None:
        requests = engine_process._Requests(handlers)
        tasks = [Task(number, "", b"") for number in range(count)]
        await asyncio.wait_for(asyncio.gather(*(engine_process._report(requests, pipe, task) for task in tasks)), 30)

    sent: list[Outcome] = []
    pipe: Any = SimpleNamespace(send=sent.append)
    asyncio.run(serve())
    return sorted(sent, key=lambda outcome: outcome.number)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RefusedError("no such thing"), "no such thing"),
        (HTTPException(500, "Out of memory."), "the engine gave the request up: Out of memory."),
        (RuntimeError("it stopped"), "the engine gave the request up: RuntimeError: it stopped"),
        (TimeoutError(), "the engine gave the request up: TimeoutError: "),
        (KeyError("rid"), "the engine gave the request up: KeyError: 'rid'"),
        (asyncio.CancelledError(), "the engine gave the request up: CancelledError: "),
        (Panic("index out of range"), "the engine gave the request up: Panic: index out of range"),
    ],
)
def test_whatever_the_engine_raises_is_the_requests_error(error, message):
    assert outcomes(GivesUp(error)) == [Outcome(0, None, message)]


@pytest.mark.parametrize(
    "error", [ValueError("no template"), Panic("no template"), asyncio.CancelledError("no template")]
)
def test_a_line_that_cannot_be_planned_does_not_end_the_others(error, monkeypatch):
    async def plan(self: Handlers, line: Line) -> Planned:
        if line.number == 1:
            raise error
        return Planned(line.number, None, 1, 0, 1)

    monkeypatch.setattr(Handlers, "_plan", plan)
    planned = list(Handlers.__new__(Handlers).plan([Line(number, CHAT, b"") for number in range(3)]))
    assert [(type(found), found.number) for found in planned] == [(Planned, 0), (Refused, 1), (Planned, 2)]
    assert planned[1].message.endswith("no template")


def test_a_full_queue_is_waited_for(monkeypatch):
    monkeypatch.setattr(engine_process, "_RETRY_SECONDS", 0.001)
    found = outcomes(SmallQueue(2), count=9)
    assert [outcome.number for outcome in found] == list(range(9))
    assert all(outcome.answer is not None for outcome in found)


def test_requests_that_never_have_room_do_not_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(engine_process, "_RETRY_SECONDS", 0.01)
    found = outcomes(NeverHasRoom(0), count=50)
    assert all(outcome.error.endswith("raise --max-queued-requests") for outcome in found)


@pytest.mark.parametrize("page", [1, 2, 16, 64])
def test_sglang_cuts_off_nothing_of_what_there_is_room_for(page):
    pool = 64 * 100
    ready = engine_process._ready(10**6, {"max_total_num_tokens": pool, "page_size": page}, "why")
    assert ready.room >= pool - 2 * page - 6
    assert ready.strict == (page > 1)
    for prompt in range(1, ready.room):
        paged = -(-prompt // page) * page
        # Scheduler.init_req_max_new_tokens of SGLang 0.5.20
        assert ready.room - prompt <= min(pool - 1 - prompt - 1, pool - paged - page - 1)


@pytest.mark.parametrize(("context", "pool", "page"), [(100, 1000, 64), (1000, 100, 1), (1000, 100, None)])
def test_room_is_that_of_the_context_or_of_the_pool(context, pool, page):
    found = engine_process._ready(context, {"max_total_num_tokens": pool, "page_size": page}, "why")
    assert (found.room, found.strict, found.unmixed) == (94, False, "why")
