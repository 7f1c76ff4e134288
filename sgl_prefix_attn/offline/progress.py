"""Progress bar of a batch: requests done, rate, remaining time."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
_SECONDS_OF_A_LINE = 30.0  # between lines of a log


class Progress:
    """A tqdm bar on standard error, or a line of it from time to time where that is no terminal but a log.

    As a context manager it closes the bar.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._in_lines = enabled and not sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        self._started = self._told = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the first request was handed to an engine."""
        return time.perf_counter() - self._started

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            if self._in_lines:
                self._tell()
            self._bar.close()

    def say(self, what: str) -> None:
        if self._enabled:
            tqdm.write(what, file=sys.stderr)

    def over(self, items: Iterable[T], what: str, count: int) -> Iterator[T]:
        """The items, with a bar of their own if it takes long."""
        hidden = not self._enabled or self._in_lines
        bar: Iterable[T] = tqdm(items, total=count, desc=what, unit=" requests", delay=2.0, leave=False, disable=hidden)
        yield from bar

    def start(self, total: int, done: int) -> None:
        """`done` of `total` requests have been finished by earlier runs; they do not count for the rate."""
        self._started = self._told = time.perf_counter()
        self._bar = tqdm(
            total=total, initial=done, unit=" requests", dynamic_ncols=True, smoothing=0.05, disable=not self._enabled,
            **({"file": io.StringIO(), "mininterval": float("inf")} if self._in_lines else {}),
        )  # fmt: skip

    def advance(self, requests: int, prompt_tokens: int, output_tokens: int, saving: float) -> None:
        """`requests` more; totals of this run's tokens and the share of prompt tokens that came from the cache."""
        if self._bar is None:
            return
        seconds = max(1e-9, self.seconds)
        rate = (
            f"{output_tokens / seconds:.0f} out/s, {prompt_tokens / seconds:.0f} in/s, {saving:.0%} of prompts cached"
        )
        self._bar.set_postfix_str(rate, refresh=False)
        self._bar.update(requests)
        if self._in_lines and time.perf_counter() - self._told > _SECONDS_OF_A_LINE:
            self._tell()

    def _tell(self) -> None:
        self._told = time.perf_counter()
        print(self._bar, file=sys.stderr, flush=True)
