"""HTTP endpoint of live A/B tests on SGLang's server: POST starts, GET reads and renews, DELETE stops.

A command goes to all data-parallel copies. If some start and others refuse, all are stopped.

Leases run out by steps, and a server without requests has none. So a start replaces what runs if its client has been
silent for SILENT_SECONDS. Rank 0 of each copy tells its silence in the refusal, and a second command brings the
decision to all ranks. This process keeps no state: there may be several of its kind.
"""

from __future__ import annotations

import logging
import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sgl_prefix_attn.routing.live_plan import LivePlan
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import live_commands
from sgl_prefix_attn.sglang_plugin.compat import http_routes

logger = logging.getLogger(__name__)

PATH = "/prefixpack/abtest"
SILENT_SECONDS = 60.0  # clients of ours ask twice a second
MOST_BODY_BYTES = 16 << 10
_STATUS = {"unknown": 404, "refused": 409, "disabled": 503}


class Asked(BaseModel):
    """The query of GET and DELETE.

    Attributes:
        first: first row of the answer.
        token: of what was started; None: whatever runs.
    """

    model_config = ConfigDict(extra="forbid")

    first: Annotated[int, Field(ge=0, lt=1 << 53)] = 0
    token: Annotated[str, Field(max_length=64)] | None = None


class NoQuery(BaseModel):
    """The query of POST."""


def add_endpoints(settings: Settings, *, in_scheduler: bool) -> None:
    """Adds the endpoints in the server's process, if the setting live_tests asks for them."""
    if settings.live_tests and http_routes.serves_http(in_scheduler=in_scheduler):
        try:
            server = http_routes.server_without(PATH)
            if server is not None:
                add_routes(*server)
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP endpoints for live tests")


async def carried_out(manager: Any, action: str, **fields: Any) -> list[dict[str, Any]]:
    """The answers of the data-parallel copies to a command; the errors alone if some refuse."""
    if action != live_commands.START:
        answers = await _asked(manager, action, **fields)
    else:
        answers = await _started(manager, **fields)
        refused = [answer for answer in answers if "error" in answer]
        if refused and all(answer.get("silent_seconds", 0.0) >= SILENT_SECONDS for answer in refused):
            logger.warning("prefixpack: a live test is replaced: its client has been silent for a minute")
            answers = await _started(manager, **fields, replace=[answer["running"] for answer in refused])
    errors = [_of_copy(index, answer, len(answers)) for index, answer in enumerate(answers) if "error" in answer]
    return errors or answers


async def _started(manager: Any, **fields: Any) -> list[dict[str, Any]]:
    """The answers to a start; where some refuse, nothing goes on anywhere."""
    token = secrets.token_hex(8)
    answers = await _asked(manager, live_commands.START, token=token, **fields)
    errors = sum("error" in answer for answer in answers)
    if 0 < errors < len(answers):
        await _asked(manager, live_commands.STOP, token=token)
    return answers


async def _asked(manager: Any, action: str, **fields: Any) -> list[dict[str, Any]]:
    states = await http_routes.internal_states(manager, live_commands.encode(action, **fields))
    missing = {"error": {"kind": "refused", "message": "the schedulers run no packed steps"}}
    return [state.get(live_commands.ANSWER_KEY, missing) for state in states]


def _of_copy(index: int, answer: dict[str, Any], copies: int) -> dict[str, Any]:
    error = dict(answer["error"])
    if copies > 1:
        error["message"] = f"data-parallel copy {index} of {copies}: {error['message']}"
    return {"error": error}


def add_routes(app: Any, manager_of: Any) -> None:
    """Adds the endpoint to SGLang's FastAPI application.

    Args:
        manager_of: returns the tokenizer manager; called without arguments for each request.
    """
    bodies = http_routes.Bodies()

    async def answered(action: str, **fields: Any) -> dict[str, Any]:
        answers = await carried_out(manager_of(), action, **fields)
        error = answers[0].get("error")
        if error is not None:
            kind = error["kind"]
            raise http_routes.RequestError(error["message"], status=_STATUS.get(kind, 500), kind=kind)
        return {"copies": answers}

    def plan_of(body: dict[str, Any]) -> dict[str, Any]:
        return http_routes.checked(LivePlan, body).model_dump()

    async def start(request: Any) -> Any:
        http_routes.query_of(request, NoQuery)
        return await answered(live_commands.START, plan=await bodies.read(request, MOST_BODY_BYTES, plan_of))

    async def read(request: Any) -> Any:
        return await answered(live_commands.READ, **_of_query(request))

    async def stop(request: Any) -> Any:
        return await answered(live_commands.STOP, **_of_query(request))

    http_routes.add_endpoints(app, PATH, {"POST": start, "GET": read, "DELETE": stop})


def _of_query(request: Any) -> dict[str, Any]:
    return http_routes.query_of(request, Asked).model_dump(exclude_none=True)
