"""Uses of prefixes that are known in advance, from the waiting queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence


class Lookahead:
    """Requests to come, in order, and which prefixes they use.

    Args:
        limit: requests from the head of the queue that count.

    Attributes:
        on_change: called with each key whose next use changed.
    """

    def __init__(self, limit: int = 1024) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}: it has to be 0 (no look-ahead) or more")
        self.limit = limit
        self.on_change: Callable[[int], None] = _ignore
        self._arrived = 0
        self._waiting: dict[Hashable, tuple[int, Sequence[int]]] = {}  # oldest first
        self._counted: dict[Hashable, None] = {}  # those within the limit
        self._beyond: deque[Hashable] = deque()
        self._uses: dict[int, dict[int, None]] = {}  # key -> numbers of requests that use it, in order

    def __len__(self) -> int:
        """Requests within the limit."""
        return len(self._counted)

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
        if request in self._counted:
            del self._counted[request]
            for key in keys:
                numbers = self._uses.get(key)
                if numbers is not None and numbers.pop(number, self) is None:
                    if not numbers:
                        del self._uses[key]
                    self.on_change(key)
            self._fill()
        return True

    def requests(self) -> list[Hashable]:
        """All requests in the queue, in order."""
        return list(self._waiting)

    def next_use(self, key: int) -> int | None:
        """How many requests from now the prefix is used (1: by the next one), None if not within the limit."""
        number = self.next_request(key)
        return None if number is None else self.distance(number)

    def next_request(self, key: int) -> int | None:
        """Number of the next request that uses the prefix, None if there is none within the limit."""
        numbers = self._uses.get(key)
        return next(iter(numbers)) if numbers else None

    def distance(self, number: int) -> int:
        """How many requests from now the request with this number comes; 1: it is the next one."""
        head = self._waiting[next(iter(self._counted))][0]
        return min(number - head + 1, len(self._counted))

    def uses(self, key: int) -> int:
        """How many of the requests within the limit use the prefix."""
        return len(self._uses.get(key, ()))

    def follow(self, queue: Sequence[Hashable], keys_of: Callable[[Hashable], Sequence[int]]) -> None:
        """Replaces the queue. `keys_of` is called only for requests within the limit that were not there before."""
        wanted = dict.fromkeys(queue[: self.limit])
        for request in [request for request in self._waiting if request not in wanted]:
            self.remove(request)
        kept = list(self._waiting)
        order = list(wanted)
        same = next((index for index, request in enumerate(kept) if request != order[index]), len(kept))
        moved = self._take(kept[same:])
        for request in order[same:]:
            self.add(request, moved[request] if request in moved else keys_of(request))

    def clear(self) -> None:
        """Forgets the queue."""
        keys = list(self._uses)
        self._waiting.clear()
        self._counted.clear()
        self._beyond.clear()
        self._uses.clear()
        for key in keys:
            self.on_change(key)

    def _take(self, last: Sequence[Hashable]) -> dict[Hashable, Sequence[int]]:
        """Takes the last requests out of the queue and returns their keys; their numbers are given again."""
        taken = {request: self._waiting[request] for request in last}
        if len(taken) == len(self._waiting):
            self.clear()
        for request in taken:
            self.remove(request)
        self._arrived = min((number for number, _ in taken.values()), default=self._arrived)
        return {request: keys for request, (_, keys) in taken.items()}

    def _fill(self) -> None:
        while self._beyond and len(self._counted) < self.limit:
            request = self._beyond.popleft()
            entry = self._waiting.get(request)
            if entry is None or request in self._counted:  # it left before it came within the limit
                continue
            self._counted[request] = None
            number, keys = entry
            for key in keys:
                self._uses.setdefault(key, {})[number] = None
                self.on_change(key)


def _ignore(key: int) -> None:
    pass
