"""Our routes on SGLang's HTTP server, and the request that carries their commands to the schedulers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

_SERVER_MODULE = "sglang.srt.entrypoints.http_server"


def serves_http(*, in_scheduler: bool) -> bool:
    """Whether this process serves SGLang's HTTP routes, or may do so later.

    Args:
        in_scheduler: whether it looks like a scheduler's. So does a server that is a child process itself.
    """
    return not in_scheduler or _SERVER_MODULE in sys.modules


def server_without(path: str) -> tuple[Any, Callable[[], Any]] | None:
    """SGLang's FastAPI application and a function that returns its tokenizer manager; None if it has the path.

    Imports the server's module, so it is for processes that need routes only.
    """
    from sglang.srt.entrypoints import http_server

    if any(getattr(route, "path", None) == path for route in http_server.app.routes):
        return None
    return http_server.app, lambda: http_server._global_state.tokenizer_manager


def add_endpoints(app: Any, path: str, endpoints: Mapping[str, Any], *, admin_only: bool = False) -> None:
    """Adds routes to a FastAPI application. They ask for the admin API key where SGLang's own /flush_cache does.

    Args:
        app: the application.
        path: of all the routes.
        endpoints: coroutine functions by HTTP method, without arguments or with `request: Request`.
        admin_only: refuse all requests where the server has no admin API key.
    """
    from fastapi import Request
    from sglang.srt.utils.auth import AuthLevel, auth_level

    level = AuthLevel.ADMIN_FORCE if admin_only else AuthLevel.ADMIN_OPTIONAL
    for method, endpoint in endpoints.items():
        # FastAPI resolves annotations, which are strings here, in the module and would not find a local name.
        if "request" in endpoint.__annotations__:
            endpoint.__annotations__["request"] = Request
        app.add_api_route(path, auth_level(level)(endpoint), methods=[method])


async def internal_states(manager: Any, request_id: str) -> list[dict[str, Any]]:
    """The schedulers' internal states, one for each data-parallel copy of the model.

    SGLang's request for them exists in every version and reaches all ranks between the same two steps. Its id can carry
    a command.

    Args:
        manager: SGLang's tokenizer manager.
        request_id: of the request.
    """
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    outputs = await manager.get_internal_state_communicator(GetInternalStateReq(rid=request_id))
    return [output.internal_state for output in outputs]
