"""Sends the samples of a prompt to one engine, within a bound on its load. Needs no cluster and no SGLang.

Requests share KV only inside an engine. A router that looks at load alone spreads the samples of a prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

LOAD_BOUND = 1.25
SLACK = 32
KEYS_KEPT = 100_000
_KEY_BYTES = 8


def group_key(prompt: str | Sequence[int]) -> str:
    """The key of a prompt's group: 16 hexadecimal digits, the same for all its samples, in every process.

    Args:
        prompt: text or token ids. The two give different keys.
    """
    # "surrogatepass": half of a surrogate pair is no character, but JSON can hold one.
    data = prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else b"\0" + array("q", prompt).tobytes()
    return hashlib.blake2b(data, digest_size=_KEY_BYTES).hexdigest()


class GroupRouter:
    """Assigns requests to servers: a group stays on its server as long as the server's load allows it.

    A group's first request goes to the server with the fewest requests. Later ones follow, unless the server would have
    more than `load_bound` times the mean number of requests, plus `slack`: then the group moves to the server with the
    fewest.

    Not thread-safe; an asyncio program or a Ray actor calls it from one thread.

    Args:
        servers: names of the servers; there may be none until `add` is called.
        load_bound: largest load of a server that keeps its groups, as a multiple of the mean; at least 1.
        slack: requests that a server may have beyond that; at least the samples of one prompt, to keep them together.
        keys_kept: groups that are remembered; the one that was used longest ago is forgotten first.

    Attributes:
        in_flight: requests of each server.
        moved: requests that left their group's server because of its load.

    Raises:
        ValueError: a bound below 1.
    """

    def __init__(
        self,
        servers: Iterable[str],
        *,
        load_bound: float = LOAD_BOUND,
        slack: int = SLACK,
        keys_kept: int = KEYS_KEPT,
    ) -> None:
        self.in_flight = dict.fromkeys(servers, 0)
        if not load_bound >= 1:
            raise ValueError(f"load_bound={load_bound}: a bound below 1 leaves no server with room")
        self.moved = 0
        self._bound, self._slack = load_bound, slack
        self._keys_kept = keys_kept
        self._server_of: OrderedDict[Hashable, str] = OrderedDict()

    def acquire(self, key: Hashable) -> str:
        """The server for one more request of a group. Call `release` when the request has ended.

        Raises:
            RuntimeError: there is no server.
        """
        if not self.in_flight:
            raise RuntimeError("GroupRouter has no server")
        server = self._server_of.pop(key, None)
        if server not in self.in_flight or self._is_full(server):
            self.moved += server in self.in_flight
            server = min(self.in_flight, key=lambda name: self.in_flight[name])
        self._server_of[key] = server
        if len(self._server_of) > self._keys_kept:
            self._server_of.popitem(last=False)
        self.in_flight[server] += 1
        return server

    def release(self, server: str) -> None:
        """Counts the end of a request."""
        if self.in_flight.get(server, 0) > 0:
            self.in_flight[server] -= 1

    def remove(self, server: str) -> None:
        """Takes a server out; its groups move with their next request."""
        self.in_flight.pop(server, None)

    def add(self, server: str) -> None:
        """Adds a server without requests."""
        self.in_flight.setdefault(server, 0)

    def forget_groups(self) -> int:
        """Lets every group choose a server anew; requests stay counted. Returns how many groups there were."""
        groups = len(self._server_of)
        self._server_of.clear()
        return groups

    def _is_full(self, server: str) -> bool:
        """Whether one more request would exceed the bound on the server."""
        mean = (sum(self.in_flight.values()) + 1) / len(self.in_flight)
        return self.in_flight[server] + 1 > self._bound * mean + self._slack
