"""Exceptions of ours, which SGLang never sees, and features that are off: one record for a process.

Both are in `GET /server_info` and in the metrics. Each place that raises is logged once, with its traceback.

Ranks of a model decide about admission and eviction each for itself, by the same queue, tree and requests. So an
exception comes on all of them at the same place, and they go on alike. Only memory can be missing on one rank alone.
Then SGLang gets the exception, as ranks with different batches would wait for each other for ever.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol

import torch

logger = logging.getLogger(__name__)

WITHOUT: Final = "SGLang goes on without it"
OF_AN_EXCEPTION: Final = "an exception, which the log has"
OF_ONE_RANK: Final = (MemoryError, torch.OutOfMemoryError)  # exceptions that one rank may have alone
# Parts that decide what all ranks have to decide alike.
DECIDING: Final = frozenset(
    {"group_scheduling", "one_token_steps", "shared_prefill", "pins", "pins.command"}
    | {f"pins.{hook}" for hook in ("add_one_req", "calc_priority", "evict", "flush_cache", "release_kv", "run_batch")}
)
_MOST_LOGGED: Final = 100  # tracebacks


def several_ranks() -> bool:
    """Whether other processes run the same model in step with this one."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


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
        """Counts an exception; the first one of each line that raises is logged.

        Raises:
            MemoryError: of this rank alone, where the others decide without it.
        """
        self.counts[part] += 1
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = (part, type(error), at and (at.tb_frame.f_code, at.tb_lineno))
        if where not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(where)
            logger.error("prefixpack: %s failed; %s", part, consequence, exc_info=error)
        if part in DECIDING and isinstance(error, OF_ONE_RANK) and several_ranks():
            raise error

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
