"""The worth of keeping a prefix: expected remaining uses divided by the time to the next one, per token."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from sgl_prefix_attn.pinning.lookahead import Lookahead
from sgl_prefix_attn.pinning.reuse import ReuseMemory

SPENT = -1.0  # below what nothing is known of


class PrefixWorth:
    """Brings together what is known of the future and what is remembered of the past.

    A use that is known to come in `d` requests is worth 1/d: the nearest first, which is what the offline optimum
    keeps. A prefix of an announced group is worth its remaining uses, since the members of a group run together. What
    no request in sight uses is worth what the memory of reuse says, given that none of them uses it. A prefix whose
    last announced use is over is the first to go until it is used again.

    Args:
        memory: None: only the future counts, and prefixes without a known use are worth 0.
        lookahead: None: no queue is known.
        max_keys: prefixes remembered as announced, and as spent; those whose announced uses are the longest ago are
            forgotten first, because a group that ended early never comes to its last use.

    Raises:
        ValueError: max_keys is below 1.
    """

    def __init__(
        self, memory: ReuseMemory | None = None, lookahead: Lookahead | None = None, max_keys: int = 1 << 18
    ) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys is {max_keys}: it has to be at least 1")
        self._max_keys = max_keys
        self.memory = memory
        self.lookahead = lookahead if lookahead is not None else Lookahead(0)
        self._announced: dict[int, int] = {}  # announced or used longest ago first
        self._spent: dict[int, None] = {}  # spent longest ago first

    @property
    def any_spent(self) -> bool:
        """Whether the last announced use of some prefix is over, so that its worth is below zero."""
        return bool(self._spent)

    def announce(self, keys: Iterable[int], uses: int) -> None:
        """A group's prefix will be used `uses` times more, and then no more. Raises ValueError if uses is below 1."""
        if uses < 1:
            raise ValueError(f"uses is {uses}: a group has at least one member")
        for key in keys:
            self._announced[key] = self._announced.pop(key, 0) + uses
            self._spent.pop(key, None)
        self._forget(self._announced)

    def scheduled(self, request: Hashable, keys: Sequence[int]) -> list[int]:
        """A request was given its KV. Returns the keys whose last announced use this was: evict them early."""
        self.lookahead.remove(request)
        if self.memory is not None:
            self.memory.record(keys)
        ended = []
        for key in keys:
            left = self._announced.pop(key, None)
            if left is None:
                self._spent.pop(key, None)
            elif left > 1:
                self._announced[key] = left - 1
            else:
                self._spent.pop(key, None)
                self._spent[key] = None
                ended.append(key)
        self._forget(self._spent)
        return ended

    def of(self, key: int | None) -> float:
        """Worth per token of the prefix with this key; None: a remainder without a key, which nobody can ask for."""
        if key is None:
            return 0.0
        announced = self._announced.get(key)
        if announced is not None:
            return float(announced)
        if key in self._spent and not self.lookahead.uses(key):
            return SPENT
        ahead = self.lookahead.next_use(key)
        if ahead is not None:
            return 1.0 / ahead
        return 0.0 if self.memory is None else self.memory.worth(key, len(self.lookahead))

    def _forget(self, keys: dict[int, Any]) -> None:
        while len(keys) > self._max_keys:
            del keys[next(iter(keys))]

    def clear(self) -> None:
        """The cache is empty: what was spent is gone. What is remembered and announced stays."""
        self._spent.clear()
