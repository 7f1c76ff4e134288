"""Leaves of a cached tree in the order of their retention scores, kept up to date without rescoring all of them.

The score of a leaf changes with time, but leaves of one score group keep their order: see `RetentionScores.placement`.
So each group is one sorted list, and an eviction reads only the front of each list, or of each age bin of a list.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """Sort key of a leaf within its group; ties go to the least recently used, then to the deepest leaf."""

    position: int
    last_use: int
    minus_begin: int
    node_id: int


class Rank(NamedTuple):
    """Sort key of a node among all nodes that can be evicted: the smallest goes first."""

    score: float
    last_use: int
    minus_begin: int
    node_id: int


class Scores(Protocol):
    """Scores of the positions within a group."""

    def score(self, group: int, position: int) -> float: ...

    def last_of_equal_score(self, group: int, position: int) -> int | None:
        """Last position that has the score of this one, None if scores never fall with the position."""


class LeafOrder:
    """Sorted leaves by group. Adding, moving and removing a leaf take O(log n) comparisons."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Entry]] = {}
        self._places: dict[int, tuple[int, Entry]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def put(self, group: int, entry: Entry) -> None:
        """Adds a leaf, or moves it to this place."""
        place = (group, entry)
        if self._places.get(entry.node_id) == place:
            return
        self.discard(entry.node_id)
        self._places[entry.node_id] = place
        insort(self._groups.setdefault(group, []), entry)

    def discard(self, node_id: int) -> None:
        """Removes a leaf if it is there."""
        place = self._places.pop(node_id, None)
        if place is not None:
            group, entry = place
            entries = self._groups[group]
            del entries[bisect_left(entries, entry)]

    def clear(self) -> None:
        self._groups.clear()
        self._places.clear()

    def ascending(self, scores: Scores) -> Iterator[Rank]:
        """Ranks of all leaves, lowest first. The order must not be changed during the iteration."""
        heads: list[tuple[Rank, int, int, int]] = []
        for group, entries in self._groups.items():
            begin = 0
            while begin < len(entries):
                last = scores.last_of_equal_score(group, entries[begin].position)
                end = len(entries) if last is None else bisect_right(entries, last, begin, key=_position)
                heads.append((_rank(scores, group, entries[begin]), group, begin, end))
                begin = end
        heapq.heapify(heads)
        while heads:
            rank, group, index, end = heads[0]
            yield rank
            index += 1
            if index < end:
                heapq.heapreplace(heads, (_rank(scores, group, self._groups[group][index]), group, index, end))
            else:
                heapq.heappop(heads)


def _position(entry: Entry) -> int:
    return entry.position


def _rank(scores: Scores, group: int, entry: Entry) -> Rank:
    return Rank(scores.score(group, entry.position), entry.last_use, entry.minus_begin, entry.node_id)


def combined(leaves: Iterator[Rank], others: list[Rank]) -> Iterator[Rank]:
    """Combines ascending ranks with a heap that may grow during the iteration."""
    head = next(leaves, None)
    while head is not None or others:
        if head is None or (others and others[0] < head):
            yield heapq.heappop(others)
        else:
            yield head
            head = next(leaves, None)
