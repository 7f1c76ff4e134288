"""verl: a load balancer that keeps the samples of a prompt on one server, within a bound on its load.

It has the methods of verl's `GlobalRequestLoadBalancer`. The agent loop sends `request_id(uid of the prompt, sample)`.
Wrap the class with `ray.remote` where verl expects an actor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sgl_prefix_attn.group_routing import LOAD_BOUND, GroupRouter

_SEPARATOR = "/sample-"


def request_id(group: str, sample: int | str) -> str:
    """A request id that names its group."""
    return f"{group}{_SEPARATOR}{sample}"


class GroupBalancer:
    """Routes by the group in a request id; an id without a group is a group of its own.

    Args:
        servers: handles by server id, or ids.
        load_bound: as in `GroupRouter`.
    """

    def __init__(self, servers: Mapping[str, Any] | Iterable[str], load_bound: float = LOAD_BOUND) -> None:
        self._router = GroupRouter(servers, load_bound=load_bound)

    def acquire_server(self, request_id: str) -> str:
        """The server id for a request."""
        return self._router.acquire(request_id.partition(_SEPARATOR)[0])

    def release_server(self, server_id: str) -> None:
        """Counts the end of a request."""
        self._router.release(server_id)
