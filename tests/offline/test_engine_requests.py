"""Every request that SGLang's engine is given has an outcome, whatever the engine makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException

from sgl_prefix_attn.offline import engine_process
from sgl_prefix_attn.offline.engines import Outcome, Task

SAMPLE = {"output_ids": [5], "text": "x", "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": 1}}
FULL = HTTPException(503, "The request queue is full.")


class GivesUp:
    """An engine that ends every request with this exception."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def async_generate(self, **_: Any) -> Any:
        raise self._error


class SmallQueue:
    """An engine whose queue has room for that many requests; one takes a moment."""

    def __init__(self, room: int) -> None:
        self._room, self._queued = room, 0

    async def async_generate(self, **_: Any) -> Any:
        if self._queued == self._room:
            raise FULL
        self._queued += 1
        await asyncio.sleep(0.01)
        self._queued -= 1
        return SAMPLE


class NeverHasRoom(SmallQueue):
    """An engine whose queue refuses everything, after a moment."""

    async def async_generate(self, **request: Any) -> Any:
        await asyncio.sleep(0.002)
        raise FULL


def outcomes(engine: Any, count: int = 1, samples: Sequence[int] = ()) -> list[Outcome]:
    async def serve() -> None:
        requests = engine_process._Requests(engine)
        sampling = [{"n": n} for n in samples] or [{}] * count
        tasks = [Task(number, np.array([1], dtype=np.int32), values) for number, values in enumerate(sampling)]
        await asyncio.wait_for(asyncio.gather(*(engine_process._report(requests, pipe, task) for task in tasks)), 30)

    sent: list[Outcome] = []
    pipe: Any = SimpleNamespace(send=sent.append)
    asyncio.run(serve())
    return sorted(sent, key=lambda outcome: outcome.number)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such thing"), "no such thing"),
        (HTTPException(500, "Out of memory."), "the engine gave the request up: Out of memory."),
        (RuntimeError("it stopped"), "the engine gave the request up: RuntimeError: it stopped"),
        (TimeoutError(), "the engine gave the request up: TimeoutError: "),
        (KeyError("rid"), "the engine gave the request up: KeyError: 'rid'"),
    ],
)
def test_whatever_the_engine_raises_is_the_requests_error(error, message):
    assert outcomes(GivesUp(error)) == [Outcome(0, None, message)]


def test_an_aborted_sample_is_the_requests_error():
    class Aborts:
        async def async_generate(self, **_: Any) -> Any:
            return [SAMPLE, {"meta_info": {"finish_reason": {"type": "abort", "message": "it took too long"}}}]

    assert outcomes(Aborts()) == [Outcome(0, None, "the engine gave the request up: it took too long")]


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
    room = engine_process._room(10**6, {"max_total_num_tokens": pool, "page_size": page})
    assert room >= pool - 2 * page - 6
    for prompt in range(1, room):
        paged = -(-prompt // page) * page
        # Scheduler.init_req_max_new_tokens of SGLang 0.5.20
        assert room - prompt <= min(pool - 1 - prompt - 1, pool - paged - page - 1)


def test_room_is_that_of_the_context_or_of_the_pool():
    assert engine_process._room(100, {"max_total_num_tokens": 1000, "page_size": 64}) == 94
    assert engine_process._room(1000, {"max_total_num_tokens": 100, "page_size": 1}) == 94
    assert engine_process._room(1000, {"max_total_num_tokens": 100, "page_size": None}) == 94


@pytest.mark.parametrize(
    ("manager", "size"),
    [
        (SimpleNamespace(model_config=SimpleNamespace(vocab_size=32_000)), 32_000),
        (SimpleNamespace(model_config=SimpleNamespace(vocab_size=None)), None),
        (SimpleNamespace(model_config=SimpleNamespace()), None),
        (SimpleNamespace(), None),
    ],
)
def test_the_vocabulary_is_unknown_where_sglang_does_not_tell_it(manager, size):
    assert engine_process._vocab_size(SimpleNamespace(tokenizer_manager=manager)) == size
