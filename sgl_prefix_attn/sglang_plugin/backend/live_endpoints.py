"""HTTP endpoints of live A/B tests and recordings on SGLang's server: POST starts, GET reads and renews, DELETE stops.

A command goes to all data-parallel copies. If some start and others refuse, all are stopped.

Leases run out by steps, and a server without requests has none. So a start replaces what runs if its client has been
silent for SILENT_SECONDS. Rank 0 of each copy tells its silence in the refusal, and a second command brings the
decision to all ranks. This process keeps no state: there may be several of its kind.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin import http_routes
from sgl_prefix_attn.sglang_plugin.backend import live_commands

logger = logging.getLogger(__name__)

PATHS = {"/prefixpack/abtest": live_commands.TEST, "/prefixpack/record": live_commands.RECORDING}
SILENT_SECONDS = 60.0  # clients of ours ask twice a second
_STATUS = {"invalid": 400, "unknown": 404, "refused": 409, "disabled": 503}


def add_endpoints(settings: Settings, *, in_scheduler: bool) -> None:
    """Adds the endpoints in the server's process, if the setting live_tests asks for them."""
    if settings.live_tests and http_routes.serves_http(in_scheduler=in_scheduler):
        try:
            for path, what in PATHS.items():
                server = http_routes.server_without(path)
                if server is not None:
                    add_routes(*server, path, what)
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP endpoints for live tests")


async def carried_out(manager: Any, what: str, action: str, **fields: Any) -> list[dict[str, Any]]:
    """The answers of the data-parallel copies to a command; the errors alone if some refuse."""
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
    states = await http_routes.internal_states(manager, live_commands.encode(what, action, **fields))
    missing = {"error": {"kind": "refused", "message": "the schedulers run no packed steps"}}
    return [state.get(live_commands.ANSWER_KEY, missing) for state in states]


def _of_copy(index: int, answer: dict[str, Any], copies: int) -> dict[str, Any]:
    error = dict(answer["error"])
    if copies > 1:
        error["message"] = f"data-parallel copy {index} of {copies}: {error['message']}"
    return {"error": error}


def add_routes(app: Any, manager_of: Any, path: str, what: str) -> None:
    """Adds the routes of an endpoint to SGLang's FastAPI application.

    Args:
        manager_of: returns the tokenizer manager; called without arguments for each request.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse

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

    http_routes.add_endpoints(app, path, {"POST": start, "GET": read, "DELETE": stop})
