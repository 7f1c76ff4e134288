"""One run of drawn requests on one server: tokens per second, whole and of the steady state, and steps by route."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.measure import growth, warm_up
from benchmarks.serving.step_log import read_steps, summary
from sgl_prefix_attn.demo.client import Answer, RequestError, Sample, replay
from sgl_prefix_attn.demo.server import Server, ServerError
from sgl_prefix_attn.demo.workload import Request

READ_SECONDS = 2.0  # between looks at /server_info


class WindowOver(Exception):  # noqa: N818
    """The measured window has ended; open requests are dropped."""


@dataclasses.dataclass
class Window:
    """Counts tokens of the steady state.

    Attributes:
        begin_after, end_after: ended samples with which the window begins and ends.
        seconds: its length at most; None: requests go on to their end.
        prompt_tokens, computed_tokens: of the requests that ended since the window began.
    """

    begin_after: int
    end_after: int
    seconds: float | None
    ended: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    begun: float | None = None
    over: float | None = None
    begun_wall: float = 0.0
    _seen: dict[int, int] = dataclasses.field(default_factory=dict)
    _kept: list[Sample] = dataclasses.field(default_factory=list)

    def on_answer(self, answer: Answer) -> None:
        self.ended += len(answer.samples)
        if self.begun is None and self.ended >= self.begin_after:
            self.begun, self.begun_wall = time.perf_counter(), time.time()
        if self.begun is not None and self.over is None:
            if self.ended >= self.end_after:
                self.over = time.perf_counter()
            self.prompt_tokens += len(answer.request.prompt) * len(answer.samples)
            self.computed_tokens += sum(len(answer.request.prompt) - sample.cached_tokens for sample in answer.samples)

    def on_token(self, request: Request, sample: Sample) -> None:
        if id(sample) not in self._seen:
            self._kept.append(sample)  # so that no later sample gets its id
        grown = len(sample.tokens) - self._seen.get(id(sample), 0)
        self._seen[id(sample)] = len(sample.tokens)
        if self.begun is None:
            return
        now = time.perf_counter()
        if self.over is None:
            self.tokens += grown
            if self.seconds is not None and now - self.begun >= self.seconds:
                self.over = now
        if self.seconds is not None and self.over is not None:
            raise WindowOver

    @property
    def measured_seconds(self) -> float:
        assert self.begun is not None
        return (self.over or time.perf_counter()) - self.begun


class Reader:
    """Reads the counters of prefixpack while a run goes on, and shares out the time by what steps did."""

    def __init__(self, server: Server) -> None:
        self._server, self._over = server, threading.Event()
        self.begin = self._last = self._counters()
        self.grown: dict[str, Any] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Reader:
        if self.begin is not None:
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        if self.begin is not None:
            self._thread.join()

    def _counters(self) -> dict[str, Any] | None:
        state = self._server.packing_state()
        return None if state is None else state["counters"]

    def _read(self) -> None:
        then = time.perf_counter()
        while True:
            over = self._over.wait(READ_SECONDS)
            try:
                counters = self._counters()
            except ServerError:  # the run says what happened to it
                return
            if counters is None or self._last is None or self.begin is None:
                return
            now = time.perf_counter()
            steps = by_route(growth(self._last, counters))
            for name, count in steps.items():
                self.seconds[name] += (now - then) * count / sum(steps.values())
            self._last, then, self.grown = counters, now, growth(self.begin, counters)
            if over:
                return


def by_route(grown: dict[str, Any]) -> dict[str, int]:
    """Steps of a run by where they went and why."""
    routed, packed = grown.get("routed_steps", {}), grown.get("steps_packed", {})
    left, unrouted = routed.get("packed", 0), dict(packed)
    for mode in ("decode", "verify"):  # the modes that have a route
        taken = min(left, unrouted.get(mode, 0))
        unrouted[mode] = unrouted.get(mode, 0) - taken
        left -= taken
    return {
        **{f"routed {name}": count for name, count in routed.items()},
        **{f"packed {name}": count for name, count in unrouted.items() if count},
        **{f"fallback {name}": count for name, count in grown.get("fallbacks", {}).items()},
    }


def measure(server: Server, requests: Sequence[Request], running: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run on one server, whole or up to the end of its window.

    Raises:
        RequestError: the requests ended before the window did; more groups are needed.
    """
    warm_up(server, requests)
    server.flush_cache()
    begin = min(running, len(requests) // 3)
    end = len(requests) - begin if args.window is None else len(requests) + 1
    window = Window(begin, end, args.window)
    answers: list[Answer] = []
    with Reader(server) as reader:
        begun = time.perf_counter()
        with contextlib.suppress(WindowOver):
            answers = replay(
                server.url, requests, on_answer=window.on_answer, on_token=window.on_token, timeout_seconds=args.limit
            )
        seconds = time.perf_counter() - begun
    if answers and args.window is not None:
        raise RequestError(f"all {len(requests)} requests ended before the window of {args.window:g} s; raise --groups")
    server.post("/abort_request", {"abort_all": True})
    over = window.begun_wall + window.measured_seconds
    steps = [
        s
        for s in read_steps(server.log_text().splitlines())
        if window.begun_wall <= s.end - s.seconds and s.end <= over
    ]
    tokens = sum(len(sample.tokens) for answer in answers for sample in answer.samples)
    of_group = len(requests) / len({request.name.rpartition("-")[0] for request in requests})
    return {
        "tokens_per_second": round(window.tokens / window.measured_seconds, 1),
        "whole_tokens_per_second": round(tokens / seconds, 1) if answers else None,
        "window_seconds": round(window.measured_seconds, 2),
        "seconds": round(seconds, 1),
        "requests": len(requests),
        "output_tokens": tokens if answers else None,
        "retractions": sum(sample.retractions for answer in answers for sample in answer.samples),
        "ended_samples": window.ended,
        "prompts_computed": round(of_group * window.computed_tokens / max(1, window.prompt_tokens), 2),
        "steps": summary(steps),
        "routed_steps": reader.grown.get("routed_steps", {}),
        "steps_packed": reader.grown.get("steps_packed", {}),
        "fallbacks": reader.grown.get("fallbacks", {}),
        "seconds_by_route": {name: round(spent, 1) for name, spent in reader.seconds.items() if spent},
    }
