"""Uses of prefixes that are known in advance: the waiting queue, or what is left of an offline batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence


class Lookahead:
    """Requests to come, in order, and which prefixes they use.

    Args:
        limit: requests from the head of the queue that are looked at; the others only wait.
    """

    def __init__(self, limit: int = 1024) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}: it has to be 0 (no look-ahead) or more")
        self._limit = limit
        self._arrived = 0
        self._waiting: dict[Hashable, tuple[int, Sequence[int]]] = {}  # oldest first
        self._seen: dict[Hashable, None] = {}  # those within the limit
        self._beyond: deque[Hashable] = deque()
        self._uses: dict[int, dict[int, None]] = {}  # key -> numbers of requests that use it, in order

    def __len__(self) -> int:
        """Requests that are looked at."""
        return len(self._seen)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._waiting

    def add(self, request: Hashable, keys: Sequence[int]) -> None:
        """A request joins the end of the queue. Raises ValueError if it is in the queue already."""
        if request in self._waiting:
            raise ValueError(f"request {request!r} is in the queue already")
        self._waiting[request] = (self._arrived, keys)
        self._arrived += 1
        self._beyond.append(request)
        self._fill()

    def remove(self, request: Hashable) -> bool:
        """A request leaves the queue, scheduled or given up; whether it was in it."""
        entry = self._waiting.pop(request, None)
        if entry is None:
            return False
        number, keys = entry
        if request in self._seen:
            del self._seen[request]
            for key in keys:
                numbers = self._uses.get(key)
                if numbers is not None and numbers.pop(number, self) is None and not numbers:
                    del self._uses[key]
            self._fill()
        return True

    def requests(self) -> list[Hashable]:
        """All requests in the queue, in order."""
        return list(self._waiting)

    def next_use(self, key: int) -> int | None:
        """How many requests from now the prefix is used (1: by the next one), None if not within the limit."""
        numbers = self._uses.get(key)
        if not numbers:
            return None
        head = self._waiting[next(iter(self._seen))][0]
        return min(next(iter(numbers)) - head + 1, len(self._seen))

    def uses(self, key: int) -> int:
        """How many of the requests within the limit use the prefix."""
        return len(self._uses.get(key, ()))

    def follow(self, queue: Sequence[Hashable], keys_of: Callable[[Hashable], Sequence[int]]) -> None:
        """Makes this the queue: who left, who joined at the end, or another order altogether.

        Only the requests within the limit are taken over, so `keys_of` is asked for no others.
        """
        wanted = dict.fromkeys(queue[: self._limit])
        for request in list(self._waiting):
            if request not in wanted:
                self.remove(request)
        kept = list(self._waiting)
        if kept != list(wanted)[: len(kept)]:
            self.clear()
            kept = []
        for request in list(wanted)[len(kept) :]:
            self.add(request, keys_of(request))

    def clear(self) -> None:
        """Forgets the queue."""
        self._waiting.clear()
        self._seen.clear()
        self._beyond.clear()
        self._uses.clear()

    def _fill(self) -> None:
        while self._beyond and len(self._seen) < self._limit:
            request = self._beyond.popleft()
            entry = self._waiting.get(request)
            if entry is None or request in self._seen:  # it left while it waited beyond the limit
                continue
            self._seen[request] = None
            number, keys = entry
            for key in keys:
                self._uses.setdefault(key, {})[number] = None
