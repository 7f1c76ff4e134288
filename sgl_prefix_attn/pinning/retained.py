"""Prefixes that clients ask to keep: soft, for a time, and within a budget that namespaces share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PRIORITY = 100
_MOST_STORED = 4  # times the budget, in keys of all entries: entries may share keys


@dataclass(frozen=True, slots=True)
class _Entry:
    """A kept prefix: its keys, one a block. The last of them identifies it."""

    keys: Sequence[int]
    namespace: str | None
    priority: int
    expires: float


class RetainedPrefixes:
    """The prefixes that are kept, by the key of their last block.

    An entry keeps all blocks from the beginning of its prefix, since blocks below a missing one serve nobody. A block
    of several entries counts once. If the budget is exceeded, the namespace that holds the most loses its oldest entry.

    Args:
        budget: blocks that may be kept.
        on_change: called with each key whose priority changes.
    """

    def __init__(self, budget: int, on_change: Callable[[int], None]) -> None:
        self.budget = budget
        self._on_change = on_change
        self._entries: dict[int, _Entry] = {}  # oldest first
        # How many entries hold a block, by its key and their priorities: thousands may share their first blocks.
        self._held: dict[int, dict[int, int]] = {}
        # Entries of a namespace, oldest first, and how many keys they have.
        self._of: dict[str | None, dict[int, None]] = {}
        self._stored: dict[str | None, int] = {}
        self._all_stored = 0
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Blocks that are kept."""
        return len(self._held)

    def priority(self, key: int) -> int:
        """The highest priority with which a block is kept, 0 if it is not."""
        return max(self._held.get(key, ()), default=0)

    def keep(self, keys: Sequence[int], priority: int, expires: float, namespace: str | None) -> None:
        """Keeps a prefix, no longer than the budget. Entries for a beginning of it end unless they are stronger.

        Args:
            keys: of its blocks, from the first one on.
            expires: when it ends, on the clock of `expire`.
        """
        keys = keys[: self.budget]
        if not keys:
            return
        renewed = self._entries.get(keys[-1])
        if renewed is not None:  # a hint only raises
            priority, expires = max(priority, renewed.priority), max(expires, renewed.expires)
        for key in keys:
            known = self._entries.get(key)
            if known is not None and known.priority <= priority and known.expires <= expires:
                self._end(key)
        self._entries[keys[-1]] = _Entry(keys, namespace, priority, expires)
        self._of.setdefault(namespace, {})[keys[-1]] = None
        self._stored[namespace] = self._stored.get(namespace, 0) + len(keys)
        self._all_stored += len(keys)
        for key in keys:
            held = self._held.setdefault(key, {})
            rises = priority > max(held, default=0)
            held[priority] = held.get(priority, 0) + 1
            if rises:
                self._on_change(key)
        if math.isfinite(expires):
            heapq.heappush(self._ends, (expires, keys[-1]))
        while len(self._held) > self.budget or self._all_stored > _MOST_STORED * self.budget:
            most = max(self._stored, key=self._stored.__getitem__)
            self._end(next(iter(self._of[most])))

    def give_up(self, keys: Sequence[int]) -> None:
        """Ends the entries whose last block is one of these."""
        for key in keys:
            if key in self._entries:
                self._end(key)

    def expire(self, now: float) -> None:
        """Ends the entries whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            expires, last = heapq.heappop(self._ends)
            entry = self._entries.get(last)
            if entry is not None and entry.expires == expires:
                self._end(last)
        if len(self._ends) > 2 * len(self._entries) + 64:  # of entries that were renewed
            self._ends = [(entry.expires, last) for last, entry in self._entries.items() if entry.expires < math.inf]
            heapq.heapify(self._ends)

    def clear(self) -> None:
        for index in (self._entries, self._held, self._of, self._stored, self._ends):
            index.clear()
        self._all_stored = 0

    def _end(self, last: int) -> None:
        entry = self._entries.pop(last)
        del self._of[entry.namespace][last]
        self._stored[entry.namespace] -= len(entry.keys)
        self._all_stored -= len(entry.keys)
        if not self._stored[entry.namespace]:
            del self._stored[entry.namespace], self._of[entry.namespace]
        for key in entry.keys:
            held = self._held[key]
            held[entry.priority] -= 1
            if not held[entry.priority]:
                del held[entry.priority]
            falls = entry.priority > max(held, default=0)
            if not held:
                del self._held[key]
            if falls:
                self._on_change(key)
