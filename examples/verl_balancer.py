"""verl: a load balancer that keeps the samples of a prompt on one server, within a bound on its load.

It has the methods of `RequestLoadBalancer` in `verl.workers.rollout.router` of verl 0.9.1. A YAML file names the class:

    router_class: examples.verl_balancer.GroupBalancer
    load_bound: 1.25
    slack: 32

and verl is started with `actor_rollout_ref.rollout.router_config_path=groups.yaml`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgl_prefix_attn.group_routing import KEYS_KEPT, LOAD_BOUND, SLACK, GroupRouter, group_key

_SEPARATOR = "/sample-"
_NO_SERVER = "No available servers in load balancer"  # verl's asynchronous clients wait where an error says this


def request_id(group: str, sample: int | str) -> str:
    """A request id that names its group, for a verl that does not hand over prompts."""
    return f"{group}{_SEPARATOR}{sample}"


class GroupBalancer:
    """Routes requests by their groups: those with the same first prompt, or with the same group in their ids.

    Later turns of a request follow its first one.

    Args:
        servers: handles by server id; verl may start without any.
        config: `load_bound` and `slack` of `GroupRouter`; other keys are verl's.
        max_cache_size: groups and requests that are remembered. verl passes it to a class that replaces its own.
    """

    def __init__(
        self,
        servers: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        max_cache_size: int = KEYS_KEPT,
    ) -> None:
        config = config or {}
        self._handles = dict(servers)
        self._router = GroupRouter(
            servers,
            load_bound=config.get("load_bound", LOAD_BOUND),
            slack=config.get("slack", SLACK),
            keys_kept=max_cache_size,
        )
        self._kept = max_cache_size
        self._groups: OrderedDict[str, str] = OrderedDict()  # by request id

    def require_acquire_fields(self) -> list[str]:
        """What verl sends with a request: its tokens."""
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        """What verl sends when a request ends, beside its server."""
        return []

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] | None = None) -> tuple[str, Any]:
        """The server for a request: its id and its handle.

        Raises:
            RuntimeError: there is no server, in the words that verl looks for.
        """
        if not self._handles:
            raise RuntimeError(_NO_SERVER)
        group, separator, _ = request_id.partition(_SEPARATOR)
        if not separator:
            group = self._groups.pop(request_id, "") or (request_id if prompt_ids is None else group_key(prompt_ids))
            self._groups[request_id] = group
            if len(self._groups) > self._kept:
                self._groups.popitem(last=False)
        server = self._router.acquire(group)
        return server, self._handles[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
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

    def get_total_inflight(self) -> int:
        """Requests of all servers."""
        return sum(self._router.in_flight.values())

    def get_status(self) -> dict[str, Any]:
        """Requests of each server and of all, and how many had to leave their group's server."""
        loads = dict(self._router.in_flight)
        return {
            "servers": loads,
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(loads),
            "moved": self._router.moved,
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Lets groups choose servers anew, as verl asks when servers come or go.

        Requests stay in their groups. verl sends an interrupted one again with the tokens that it has by then, which
        would be another prompt.
        """
        return {"cleared_entries": self._router.forget_groups(), "server_loads": dict(self._router.in_flight)}
