"""HTTP addresses of live A/B tests and recordings on SGLang's server: POST starts, GET reads and renews, DELETE stops.

A command goes to all data-parallel copies. If some start and others refuse, all are stopped.

Leases run out by steps, and a server without requests has none. So a start replaces what runs if its client has been
silent for SILENT_SECONDS. Rank 0 of each copy tells its silence in the refusal, and a second command brings the
decision to all ranks. This process keeps no state: there may be several of its kind.
"""

from __future__ import annotations

import logging
import secrets
import sys
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import live_commands

logger = logging.getLogger(__name__)

PATHS = {"/prefixpack/abtest": live_commands.TEST, "/prefixpack/record": live_commands.RECORDING}
_SERVER_MODULE = "sglang.srt.entrypoints.http_server"
SILENT_SECONDS = 60.0  # clients of ours ask twice a second
_STATUS = {"invalid": 400, "unknown": 404, "refused": 409, "disabled": 503}


def add_addresses(settings: Settings, *, in_scheduler: bool) -> None:
    """Adds the addresses in the server's process, if the setting live_tests asks for them."""
    if settings.live_tests and (not in_scheduler or _SERVER_MODULE in sys.modules):
        try:
            from sglang.srt.entrypoints import http_server

            known = {getattr(route, "path", None) for route in http_server.app.routes}
            for path, what in PATHS.items():
                if path not in known:
                    add_routes(http_server.app, lambda: http_server._global_state.tokenizer_manager, path, what)
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP addresses for live tests")


async def carried_out(manager: Any, what: str, action: str, **fields: Any) -> list[dict[str, Any]]:
    """The answers of the data-parallel copies to a command; the errors alone if some refuse."""
    manager.auto_create_handle_loop()
    if action != live_commands.START:
        answers = await _asked(manager, what, action, **fields)
    else:
        answers = await _started(manager, what, **fields)
        refused = [answer for answer in answers if "error" in answer]
        if refused and all(answer.get("silent_seconds", 0.0) >= SILENT_SECONDS for answer in refused):
            logger.warning("prefixpack: a live test or recording is replaced: its client has been silent for a minute")
            answers = await _started(manager, what, **fields, replace=[answer["running"] for answer in refused])
    errors = [_of_copy(index, answer, len(answers)) for index, answer in enumerate(answers) if "error" in answer]
    return errors or answers


async def _started(manager: Any, what: str, **fields: Any) -> list[dict[str, Any]]:
    """The answers to a start; where some refuse, nothing goes on anywhere."""
    token = secrets.token_hex(8)
    answers = await _asked(manager, what, live_commands.START, token=token, **fields)
    errors = sum("error" in answer for answer in answers)
    if 0 < errors < len(answers):
        await _asked(manager, what, live_commands.STOP, token=token)
    return answers


async def _asked(manager: Any, what: str, action: str, **fields: Any) -> list[dict[str, Any]]:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    request = GetInternalStateReq(rid=live_commands.encode(what, action, **fields))
    outputs = await manager.get_internal_state_communicator(request)
    missing = {"error": {"kind": "refused", "message": "the schedulers run no packed steps"}}
    return [output.internal_state.get(live_commands.ANSWER_KEY, missing) for output in outputs]


def _of_copy(index: int, answer: dict[str, Any], copies: int) -> dict[str, Any]:
    error = dict(answer["error"])
    if copies > 1:
        error["message"] = f"data-parallel copy {index} of {copies}: {error['message']}"
    return {"error": error}


def add_routes(app: Any, manager_of: Any, path: str, what: str) -> None:
    """Adds the routes of an address to SGLang's FastAPI application.

    They ask for the admin API key where /flush_cache does.

    Args:
        manager_of: returns the tokenizer manager; called without arguments for each request.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def answered(action: str, **fields: Any) -> Any:
        answers = await carried_out(manager_of(), what, action, **fields)
        error = answers[0].get("error")
        if error is not None:
            return JSONResponse({"error": error}, status_code=_STATUS.get(error["kind"], 500))
        return {"copies": answers}

    async def start(request: Request) -> Any:
        try:
            plan = await request.json()
        except (ValueError, RecursionError):
            plan = None
        return await answered(live_commands.START, plan=plan)

    async def read(request: Request) -> Any:
        first = request.query_params.get("first", "0")
        return await answered(live_commands.READ, first=int(first[:18]) if first.isdecimal() else 0, **of(request))

    async def stop(request: Request) -> Any:
        return await answered(live_commands.STOP, **of(request))

    def of(request: Any) -> dict[str, Any]:
        """What the command is for, if the client says so."""
        token = request.query_params.get("token")
        return {} if token is None else {"token": token}

    # FastAPI resolves annotations, which are strings here, in the module and would not find this local name.
    for endpoint in (start, read, stop):
        endpoint.__annotations__["request"] = Request
    endpoints: tuple[tuple[str, Any], ...] = (("POST", start), ("GET", read), ("DELETE", stop))
    for method, endpoint in endpoints:
        app.add_api_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint), methods=[method])
