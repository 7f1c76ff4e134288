"""Remembers when prefixes were used, and estimates from that how soon a prefix will be used again.

Prefixes that were used equally often form a class. For each class the memory counts after how many requests reuse
came, and how many prefixes waited that long without reuse. The score of a prefix is the highest rate of reuse over all
horizons: the chance of a use within the horizon, divided by the expected time that the prefix is kept. For independent
items this is the Gittins index.

Time is counted in requests, never in seconds, so all ranks of a server decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

CLASSES = 7  # used once, twice, ... seven times or more
_CLASS_BITS = 3
_EXACT_AGES = 8  # ages below have a bin each, then
_BINS_PER_OCTAVE = 6
_BINS = 64
_POOLING = 50.0  # weight of the rate over all classes, in prefixes of the class
_FIRST_REFRESH, _REFRESH = 16, 200  # requests between two computations of the table


def _bin(age: int) -> int:
    if age < _EXACT_AGES:
        return age
    octave = age.bit_length() - 1
    return min(_BINS - 1, _EXACT_AGES + (octave - 3) * _BINS_PER_OCTAVE + (((age - (1 << octave)) * 6) >> octave))


def _bin_starts() -> FloatArray:
    starts = list(range(_EXACT_AGES))
    octave = 3
    while len(starts) < _BINS + 1:
        first = 1 << octave
        starts += [first + -(-part * first // _BINS_PER_OCTAVE) for part in range(_BINS_PER_OCTAVE)]
        octave += 1
    return np.array(starts[: _BINS + 1], dtype=np.float64)


_STARTS = _bin_starts()
_WIDTHS: FloatArray = np.maximum(1.0, np.diff(_STARTS))
_BIN_OF_AGE = np.array([_bin(age) for age in range(int(_STARTS[_BINS - 1]) + 1)], dtype=np.int64)


class ReuseMemory:
    """Use of prefixes by key, whether they are still cached or not.

    Args:
        max_keys: keys remembered; the least recently used are forgotten first (about 130 bytes a key).
        horizon: requests after which the age of an unused prefix no longer matters.
    """

    def __init__(self, max_keys: int = 1 << 18, horizon: int = 1 << 15) -> None:
        if max_keys < 1 or horizon < 1:
            raise ValueError(f"max_keys is {max_keys} and horizon {horizon}: both have to be at least 1")
        self._max_keys = max_keys
        self._horizon = horizon
        self._records: dict[int, int] = {}  # key -> last use << _CLASS_BITS | class; least recently used first
        self._reused = np.zeros((CLASSES, _BINS))  # reuses, by class and age bin
        self._gone = np.zeros((CLASSES, _BINS))  # forgotten without reuse, by class and age bin
        self._waiting = np.zeros((CLASSES, horizon), dtype=np.int64)  # by class and last use (mod horizon)
        self._old = np.zeros(CLASSES, dtype=np.int64)  # waiting for longer than the horizon
        self._next_refresh = _FIRST_REFRESH
        self._hazard: FloatArray | None = None  # [class, age bin] chance of reuse within the bin
        self._tables: dict[int, list[list[float]]] = {}
        self.now = 0

    def __len__(self) -> int:
        return len(self._records)

    def record(self, keys: Iterable[int]) -> list[int]:
        """One request used these prefixes; time advances by one. Returns the keys that were forgotten."""
        self.now = now = self.now + 1
        slot = now % self._horizon
        self._old += self._waiting[:, slot]
        self._waiting[:, slot] = 0
        added = [0] * CLASSES
        for key in keys:
            record = self._records.pop(key, None)
            if record is None:
                kind = 0
            else:
                last, kind = record >> _CLASS_BITS, record & CLASSES
                if last == now:  # the same key twice in one request
                    self._records[key] = record
                    continue
                self._reused[kind, self._leave(last, kind)] += 1
                kind = min(kind + 1, CLASSES - 1)
            self._records[key] = now << _CLASS_BITS | kind
            added[kind] += 1
        self._waiting[:, slot] += added
        forgotten = []
        while len(self._records) > self._max_keys:
            forgotten.append(self._forget_oldest())
        if now >= self._next_refresh:
            self._refresh()
        return forgotten

    def uses(self, key: int) -> int:
        """How often the prefix was used, 0 if it is unknown; seven means seven or more."""
        record = self._records.get(key)
        return 0 if record is None else (record & CLASSES) + 1

    def known_prefix(self, keys: Sequence[int]) -> int:
        """How many of the first keys were used before."""
        known = 0
        for key in keys:
            if key not in self._records:
                break
            known += 1
        return known

    def placement(self, key: int) -> tuple[int, int] | None:
        """Reuse class and time of the last use, None if the prefix is unknown."""
        record = self._records.get(key)
        return None if record is None else (record & CLASSES, record >> _CLASS_BITS)

    def score(self, kind: int, last_use: int, unused_for: int = 0) -> float:
        """Expected uses per request for which a prefix of this class and last use is kept.

        Args:
            unused_for: requests to come that are known not to use it.
        """
        if self._hazard is None:
            return 0.0
        ahead = _bin(unused_for)
        table = self._tables.get(ahead)
        if table is None:
            table = self._tables[ahead] = self._table(int(_STARTS[ahead]))
        return table[kind][_bin(self.now - last_use)]

    def last_of_age_bin(self, last_use: int) -> int:
        """Latest last use that falls into the same age bin, and so has the same score."""
        return self.now - int(_STARTS[_bin(self.now - last_use)])

    def _leave(self, last: int, kind: int) -> int:
        """Takes one prefix out of those that wait for reuse; returns its age bin."""
        age = self.now - last
        if age >= self._horizon:
            self._old[kind] -= 1
        else:
            self._waiting[kind, last % self._horizon] -= 1
        return _bin(age)

    def _forget_oldest(self) -> int:
        key = next(iter(self._records))
        record = self._records.pop(key)
        kind = record & CLASSES
        self._gone[kind, self._leave(record >> _CLASS_BITS, kind)] += 1
        return key

    def _refresh(self) -> None:
        self._next_refresh = self.now + min(_REFRESH, max(_FIRST_REFRESH, self.now // 4))
        # Old observations lose weight, so that the memory follows a change of the load.
        if self._reused.sum() + self._gone.sum() > 4 * self._max_keys:
            self._reused *= 0.5
            self._gone *= 0.5
        ended = self._reused + self._gone
        ages = (self.now - np.arange(self._horizon)) % self._horizon
        bins = _BIN_OF_AGE[np.minimum(ages, len(_BIN_OF_AGE) - 1)]
        for kind in range(CLASSES):
            ended[kind] += np.bincount(bins, weights=self._waiting[kind], minlength=_BINS)
        ended[:, _BINS - 1] += self._old
        at_risk = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
        pooled = self._reused.sum(axis=0) / (at_risk.sum(axis=0) + 1.0)
        self._hazard = np.clip((self._reused + _POOLING * pooled) / (at_risk + _POOLING), 0.0, 0.999)
        self._tables.clear()

    def _table(self, unused_for: int) -> list[list[float]]:
        """Scores by class and age bin, given that the next `unused_for` requests do not use the prefix."""
        assert self._hazard is not None
        by_start: dict[int, list[float]] = {}
        scores: list[list[float]] = [[] for _ in range(CLASSES)]
        for age_bin in range(_BINS):
            start = _bin(int(_STARTS[age_bin]) + unused_for)
            if start not in by_start:
                hazard = self._hazard[:, start:]
                survival = np.cumprod(1.0 - hazard, axis=1)
                survival = np.concatenate([np.ones((CLASSES, 1)), survival[:, :-1]], axis=1)
                reused = np.cumsum(survival * hazard, axis=1)
                kept = unused_for + np.cumsum(survival * _WIDTHS[start:], axis=1)
                by_start[start] = (reused / kept).max(axis=1).tolist()
            for kind in range(CLASSES):
                scores[kind].append(by_start[start][kind])
        return scores
