"""Our routes on SGLang's HTTP server, and the request that carries their commands to the schedulers.

What clients send is read within bounds and checked here, before anything else sees it. A few bodies are read at a time,
and one thread checks them, so that requests of others wait for no body of ours.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

MOST_QUERY_BYTES = 512
MOST_BODIES = 4  # in memory at a time; others wait unread
MOST_READ_SECONDS = 30.0  # of a body
MOST_STRINGS = 32  # in a body, keys included
_SERVER_MODULE = "sglang.srt.entrypoints.http_server"
_COLON = re.compile(rb"\s*:")
_MOST_NAMED = 5  # problems in a message
_CHECKS = ThreadPoolExecutor(1, thread_name_prefix="prefixpack-bodies")

_Model = TypeVar("_Model", bound=BaseModel)
_Made = TypeVar("_Made")


class RequestError(ValueError):
    """A request that is refused, with the HTTP status and the kind of the error."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "invalid") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


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


def add_endpoints(
    app: Any, path: str, endpoints: Mapping[str, Callable[[Any], Awaitable[Any]]], *, admin_only: bool = False
) -> None:
    """Adds routes to a FastAPI application. They ask for the admin API key where SGLang's own /flush_cache does.

    Args:
        app: the application.
        path: of all the routes.
        endpoints: by HTTP method; takes the request, returns what is sent as JSON, and may raise RequestError.
        admin_only: refuse all requests where the server has no admin API key.
    """
    from fastapi import Request, Response
    from sglang.srt.utils.auth import AuthLevel, auth_level

    level = AuthLevel.ADMIN_FORCE if admin_only else AuthLevel.ADMIN_OPTIONAL

    def route(endpoint: Callable[[Any], Awaitable[Any]]) -> Any:
        async def answered(request: Any) -> Any:
            status = 200
            try:
                content = await endpoint(request)
            except RequestError as error:
                status, content = error.status, {"error": {"kind": error.kind, "message": str(error)}}
            return Response(orjson.dumps(content), status, media_type="application/json")

        answered.__annotations__ = {"request": Request}  # FastAPI would not find a local name in a string
        return auth_level(level)(answered)

    for method, endpoint in endpoints.items():
        app.add_api_route(path, route(endpoint), methods=[method], response_model=None)


class Bodies:
    """Reads the bodies of an application's requests."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MOST_BODIES)

    async def read(
        self, request: Any, most_bytes: int, make: Callable[[dict[str, Any]], _Made], most_values: int = MOST_STRINGS
    ) -> _Made:
        """What `make` makes of the JSON object in a body, outside of the event loop.

        Raises:
            RequestError: the body is too large, too slow or no JSON object, too many others are read, or `make` raises
                it.
        """
        try:
            await asyncio.wait_for(self._turns.acquire(), MOST_READ_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError("too many bodies are being read; try again", status=503, kind="unavailable") from None
        try:
            body = await asyncio.wait_for(_body_of(request, most_bytes), MOST_READ_SECONDS)
            return await asyncio.get_running_loop().run_in_executor(_CHECKS, lambda: make(_object(body, most_values)))
        except asyncio.TimeoutError:
            raise RequestError(f"the body took more than {MOST_READ_SECONDS:g} s", status=408) from None
        finally:
            self._turns.release()


async def _body_of(request: Any, most_bytes: int) -> bytearray:
    from starlette.requests import ClientDisconnect

    too_large = RequestError(f"the body is too large: at most {most_bytes} bytes are accepted", status=413)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 12 or int(announced) > most_bytes):
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                raise too_large
    except ClientDisconnect:
        raise RequestError("the client has gone", status=400) from None
    return body


def _object(body: bytearray, most_values: int) -> dict[str, Any]:
    """The fields of a flat JSON object.

    A parser holds Python's lock, for 0.3 s for two megabytes of empty lists. So many values are refused by counts that
    take a few milliseconds.
    """
    parts = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', 2 * MOST_STRINGS + 1)
    if len(parts) > 2 * MOST_STRINGS + 1:
        raise RequestError(f"the body has too many keys and strings: at most {MOST_STRINGS} are accepted")
    outside = b"".join(parts[::2])
    if outside.count(b"[") + outside.count(b"{") > 2:
        raise RequestError("the body is nested: a JSON object with at most one list is accepted")
    if outside.count(b",") >= most_values:
        raise RequestError(f"the body has too many values: at most {most_values} are accepted")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body has to be a JSON object: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"the body has to be a JSON object: it is of type {type(fields).__name__}")
    keys = [text for text, after in zip(parts[1::2], parts[2::2], strict=False) if _COLON.match(after)]
    if len(keys) > len(fields):  # the parser takes the last one
        twice = max(keys, key=keys.count)[:40].decode(errors="replace")
        raise RequestError(f"the body has a key twice: {twice!r}")
    return fields


def query_of(request: Any, model: type[_Model]) -> _Model:
    """The parameters of a request's query. Raises RequestError."""
    if len(request.scope["query_string"]) > MOST_QUERY_BYTES:
        raise RequestError(f"the query is too long: at most {MOST_QUERY_BYTES} bytes are accepted", status=414)
    return checked(model, dict(request.query_params), what="parameter")


def checked(model: type[_Model], fields: Mapping[str, Any], what: str = "key") -> _Model:
    """The model of these fields. Raises RequestError, which names unknown fields and what is wrong with others."""
    unknown = [repr(name[:40]) for name in fields if name not in model.model_fields]
    if unknown:
        # Before pydantic, which would describe each of them.
        known = ", ".join(model.model_fields) or "none"
        raise RequestError(f"unknown {what}: {_some(unknown, ', ')}; accepted: {known}")
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        texts = []
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            place = ".".join(map(str, problem["loc"])) or "body"
            texts.append(f"{place}: {problem['msg'].removeprefix('Value error, ')}")
        raise RequestError(_some(texts, "; ")) from None


def _some(texts: list[str], separator: str) -> str:
    more = [f"{len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
    return separator.join(texts[:_MOST_NAMED] + more)


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
