"""verl: a load balancer that keeps the samples of a prompt on one server, within a bound on its load.

It has the methods of verl's protocol `RequestLoadBalancer` (2026): verl asks it for a server with the request's id and
prompt, and tells it when the request has ended. Register it, and choose it with `router_strategy=groups`:

    from verl.workers.rollout.router import LoadBalancerRegistry  # the module with the registry in your verl
    LoadBalancerRegistry.register("groups")(GroupBalancer)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgl_prefix_attn.group_routing import KEYS_KEPT, LOAD_BOUND, SLACK, GroupRouter, group_key

_SEPARATOR = "/sample-"


def request_id(group: str, sample: int | str) -> str:
    """A request id that names its group, for a verl that does not hand over prompts."""
    return f"{group}{_SEPARATOR}{sample}"


class GroupBalancer:
    """Routes requests by their groups: those with the same first prompt, or with the same group in their ids.

    Later turns of a request follow its first one.

    Args:
        servers: handles by server id.
        config: `load_bound` and `slack` of `GroupRouter`; other keys are verl's.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        config = config or {}
        self._handles = dict(servers)
        self._router = GroupRouter(
            servers, load_bound=config.get("load_bound", LOAD_BOUND), slack=config.get("slack", SLACK)
        )
        self._groups: OrderedDict[str, str] = OrderedDict()  # by request id

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] | None = None) -> tuple[str, Any]:
        """The server for a request: its id and its handle. An earlier verl wants the id alone."""
        group, separator, _ = request_id.partition(_SEPARATOR)
        if not separator:
            group = self._groups.pop(request_id, "") or (request_id if prompt_ids is None else group_key(prompt_ids))
            self._groups[request_id] = group
            if len(self._groups) > KEYS_KEPT:
                self._groups.popitem(last=False)
        server = self._router.acquire(group)
        return server, self._handles[server]

    def release_server(self, server_id: str, prompt_len: int = 0, request_id: str | None = None) -> None:
        """Counts the end of a request."""
        self._router.release(server_id)

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Adds servers without requests."""
        self._handles.update(servers)
        for server in servers:
            self._router.add(server)

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Takes servers out; their groups move with their next request."""
        for server in server_ids:
            self._router.remove(server)
            self._handles.pop(server, None)

    def get_all_servers(self) -> list[str]:
        """Ids of the servers."""
        return list(self._router.in_flight)

    def get_status(self) -> dict[str, Any]:
        """Requests of each server, and how many had to leave their group's server."""
        return {"servers": dict(self._router.in_flight), "moved": self._router.moved}
