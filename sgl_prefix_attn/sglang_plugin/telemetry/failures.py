"""Exceptions of ours, which SGLang never sees, and features that are off: one record for a process.

Both are in `GET /server_info` and in the metrics. Each place that raises is logged once, with its traceback.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol

logger = logging.getLogger(__name__)

WITHOUT: Final = "SGLang goes on without it"
OF_AN_EXCEPTION: Final = "an exception, which the log has"
_MOST_LOGGED: Final = 100  # tracebacks


@dataclass
class Failures:
    """What has failed and what is off in this process.

    Attributes:
        counts: exceptions by the part that raised: a hook or a setting by name, `step` or `layer`.
        disabled: why a feature is off, by the name of its setting.
    """

    counts: Counter[str] = field(default_factory=Counter)
    disabled: dict[str, str] = field(default_factory=dict)
    _logged: set[tuple[Any, ...]] = field(default_factory=set, repr=False)

    def failed(self, part: str, error: BaseException, consequence: str = WITHOUT) -> None:
        """Counts an exception; the first one of each line that raises is logged."""
        self.counts[part] += 1
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = (part, type(error), at and (at.tb_frame.f_code, at.tb_lineno))
        if where not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(where)
            logger.error("prefixpack: %s failed; %s", part, consequence, exc_info=error)

    def switch_off(self, feature: str, reason: str) -> None:
        """Notes that a feature is off from now on. The first reason stays."""
        self.disabled.setdefault(feature, reason)

    def guard(self, part: str, consequence: str = WITHOUT) -> Guard:
        """A context that counts the exceptions of its block and ends them."""
        return Guard(self, part, consequence)


class Recorder(Protocol):
    """What counts exceptions."""

    def failed(self, part: str, error: BaseException, consequence: str = WITHOUT) -> None: ...


class Guard:
    """A context that ends exceptions; it may be entered any number of times.

    Args:
        failures: counts them; a `Failures` or what forwards to one.
        part, consequence: of `Failures.failed`.
    """

    __slots__ = ("_consequence", "_failures", "_part")

    def __init__(self, failures: Recorder, part: str, consequence: str = WITHOUT) -> None:
        self._failures, self._part, self._consequence = failures, part, consequence

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failures.failed(self._part, error, self._consequence)
        return True
