"""Sends a workload to a server's /generate as token streams and measures every request."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import orjson

from sgl_prefix_attn.demo.workload import Request

STALL_SECONDS = 600.0


class RequestError(RuntimeError):
    """The server answered a request with an error. The message names the request and quotes the answer."""


@dataclasses.dataclass
class Sample:
    """One generated sequence.

    request_id: SGLang's. tokens: generated token ids. cached_tokens: prompt tokens SGLang found in its prefix cache.
    retractions: how often SGLang took the running request back into its queue. finish: "length", "stop" or "abort".
    Times in seconds: `first` and `last` token since the request was sent.
    """

    request_id: str
    tokens: list[int]
    cached_tokens: int
    retractions: int
    finish: str
    first: float
    last: float

    @property
    def time_to_first_token(self) -> float:
        return self.first

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens, or None when there is only one."""
        return (self.last - self.first) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for one request: as many samples as it asked for, in SGLang's order."""

    request: Request
    samples: tuple[Sample, ...]


def replay(
    url: str,
    requests: Sequence[Request],
    *,
    on_answer: Callable[[Answer], None] | None = None,
    on_token: Callable[[Request, Sample], None] | None = None,
    timeout_seconds: float | None = None,
    stall_seconds: float = STALL_SECONDS,
    api_key: str | None = None,
) -> list[Answer]:
    """Send every request at its arrival time, or at once where that is past, and return the answers in their order.

    `on_answer` is called as each request completes, `on_token` whenever a sample has grown. Raises RequestError when
    the server refuses one, aiohttp.ClientError when the connection fails, and TimeoutError when it all takes longer
    than `timeout_seconds`, or when all are sent and none gets a token for `stall_seconds`.
    """
    answered = on_answer or (lambda answer: None)
    grown = on_token or (lambda request, sample: None)
    return asyncio.run(_replay(url, requests, answered, grown, timeout_seconds, stall_seconds, api_key))


async def _replay(
    url: str,
    requests: Sequence[Request],
    on_answer: Callable[[Answer], None],
    on_token: Callable[[Request, Sample], None],
    timeout_seconds: float | None,
    stall_seconds: float,
    api_key: str | None,
) -> list[Answer]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout, headers = aiohttp.ClientTimeout(total=None), {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        started = time.perf_counter()
        end = started + (math.inf if timeout_seconds is None else timeout_seconds)
        moved = started + max((request.arrival_seconds for request in requests), default=0.0)

        def note(request: Request, sample: Sample) -> None:
            nonlocal moved
            moved = max(moved, time.perf_counter())
            on_token(request, sample)

        async def one(request: Request) -> Answer:
            delay = request.arrival_seconds - (time.perf_counter() - started)
            await asyncio.sleep(max(0.0, delay))
            answer = await _generate(session, url, request, note)
            on_answer(answer)
            return answer

        tasks = [asyncio.create_task(one(request)) for request in requests]
        answers = asyncio.gather(*tasks)
        try:
            while not answers.done():
                left = min(end, moved + stall_seconds) - time.perf_counter()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait([answers], timeout=left)
            return answers.result()
        finally:
            for task in tasks:
                task.cancel()
            # `answers` as well: after Ctrl-C nobody has asked for its exception, and asyncio would print it.
            await asyncio.gather(answers, *tasks, return_exceptions=True)


async def _generate(
    session: aiohttp.ClientSession, url: str, request: Request, on_token: Callable[[Request, Sample], None]
) -> Answer:
    samples: dict[int, Sample] = {}
    sent = time.perf_counter()
    async with session.post(f"{url}/generate", json=request.body()) as response:
        if response.status != 200:
            raise RequestError(f"request {request.name}: status {response.status}: {await response.text()}")
        async for line in _events(response):
            now = time.perf_counter() - sent
            try:
                event = orjson.loads(line)
                sample = None if "error" in event else _record(samples, event, now)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                text = line[:200].decode(errors="replace")
                raise RequestError(f"request {request.name}: unknown event {text}: {error!r}") from error
            if "error" in event:
                raise RequestError(f"request {request.name}: {event['error']}")
            if sample is not None:
                on_token(request, sample)
    if len(samples) != request.samples:
        raise RequestError(
            f"request {request.name}: {len(samples)} samples came back, {request.samples} were asked for"
        )
    if any(not sample.finish for sample in samples.values()):
        raise RequestError(f"request {request.name}: the answer ended before its last token")
    return Answer(request, tuple(samples[index] for index in sorted(samples)))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of a server-sent event stream."""
    pending = b""
    async for chunk in response.content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield line[len(b"data: ") :]


def _record(samples: dict[int, Sample], event: dict[str, Any], now: float) -> Sample | None:
    """Update the sample an event is about, and return it; None for an event without tokens."""
    meta = event["meta_info"]
    tokens = event["output_ids"]
    if not tokens:
        return None
    sample = samples.setdefault(event.get("index", 0), Sample(meta["id"], [], 0, 0, "", first=now, last=now))
    if len(tokens) > len(sample.tokens):
        sample.last = now
    sample.tokens = tokens
    # SGLang leaves it out for a request that was aborted in the queue.
    sample.cached_tokens = meta.get("cached_tokens", sample.cached_tokens)
    sample.retractions = meta.get("num_retractions", 0)
    sample.finish = (meta.get("finish_reason") or {}).get("type", "")
    return sample
