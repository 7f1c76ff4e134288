"""The HTTP address of live A/B tests on SGLang's server: POST starts, GET reads and renews, DELETE stops."""

from __future__ import annotations

import logging
import sys
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import live_commands

logger = logging.getLogger(__name__)

PATH = "/prefixpack/abtest"
_SERVER_MODULE = "sglang.srt.entrypoints.http_server"
_STATUS = {"invalid": 400, "unknown": 404, "refused": 409, "disabled": 503}


def add_address(settings: Settings, *, in_scheduler: bool) -> None:
    """Adds the address in the server's process, if the setting live_tests asks for it."""
    if settings.live_tests and (not in_scheduler or _SERVER_MODULE in sys.modules):
        try:
            from sglang.srt.entrypoints import http_server

            if not any(getattr(route, "path", None) == PATH for route in http_server.app.routes):
                add_routes(http_server.app, lambda: http_server._global_state.tokenizer_manager)
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP address for live tests")


def add_routes(app: Any, manager_of: Any) -> None:
    """Adds the routes to SGLang's FastAPI application. They ask for the admin API key where /flush_cache does.

    Args:
        manager_of: returns the tokenizer manager; called without arguments for each request.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def answered(action: str, **fields: Any) -> Any:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        manager = manager_of()
        manager.auto_create_handle_loop()
        request = GetInternalStateReq(rid=live_commands.encode(action, **fields))
        outputs = await manager.get_internal_state_communicator(request)
        answers = [output.internal_state.get(live_commands.ANSWER_KEY) for output in outputs]
        if None in answers:
            return JSONResponse({"error": {"kind": "refused", "message": "the schedulers run no packed steps"}}, 409)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            return JSONResponse({"error": errors[0]}, status_code=_STATUS.get(errors[0]["kind"], 500))
        return {"copies": answers}

    async def start(request: Request) -> Any:
        try:
            plan = await request.json()
        except (ValueError, RecursionError):
            plan = None
        return await answered(live_commands.START, plan=plan)

    async def read(request: Request) -> Any:
        first = request.query_params.get("first", "0")
        return await answered(live_commands.READ, first=int(first) if first.isdecimal() else 0)

    async def stop() -> Any:
        return await answered(live_commands.STOP)

    # FastAPI resolves annotations, which are strings here, in the module and would not find this local name.
    for endpoint in (start, read):
        endpoint.__annotations__["request"] = Request
    endpoints: tuple[tuple[str, Any], ...] = (("POST", start), ("GET", read), ("DELETE", stop))
    for method, endpoint in endpoints:
        app.add_api_route(PATH, auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint), methods=[method])
