"""Commands of live A/B tests, as JSON in the id of SGLang's request for the internal state, as of pins.

That request reaches every rank between the same two steps, so all ranks begin and end at the same step. What only one
rank knows, as its clock, must not decide; it may be told in an answer and come back in a later command.
"""

from __future__ import annotations

import json
from typing import Any

from sgl_prefix_attn.routing.live_plan import LivePlan
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import LiveTestError, StepRouter

ID_PREFIX = "prefixpack-abtest:"
ANSWER_KEY = "prefixpack_abtest"
START, READ, STOP = "start", "read", "stop"


def encode(action: str, **fields: Any) -> str:
    """The id of the internal-state request that carries a command."""
    return ID_PREFIX + json.dumps({"action": action, **fields})


def command_of(request: Any) -> dict[str, Any] | None:
    """The command that an internal-state request carries, None if it carries none."""
    request_id = getattr(request, "rid", None)
    if not isinstance(request_id, str) or not request_id.startswith(ID_PREFIX):
        return None
    fields: dict[str, Any] = json.loads(request_id.removeprefix(ID_PREFIX))
    return fields


def answer(command: dict[str, Any], state: PluginState) -> dict[str, Any]:
    """Carries out a command, which was checked before it was sent; a refusal has "error": {"kind", "message"}.

    Reads and stops with a token are for what was started with it. A refused start tells, beside the error, what is
    running as [token, renewals] and how long its client has been silent; a start with these under "replace" ends it.

    Kinds: disabled (the setting live_tests is off), refused (this server cannot run the test), unknown (there is no
    test).
    """
    if not state.settings.live_tests:
        return _error("disabled", "live tests are off: start the server with PREFIXPACK_LIVE_TESTS=1")
    record = state.reported()
    if record is None and command["action"] != START:  # what was started before packing stopped can be ended
        record = next(iter(state.backends.values()), None)
    if record is None:
        kind = "refused" if command["action"] == START else "unknown"
        return _error(kind, "no step of this server runs packed")
    try:
        if command["action"] == START:
            return _started(command, record.router)
        return _test(command, record.router)
    except LiveTestError as error:
        refused = _error("refused", str(error))
        if error.running is None:
            return refused
        return {**refused, "running": list(error.running), "silent_seconds": error.silent_seconds}


def _started(command: dict[str, Any], router: StepRouter) -> dict[str, Any]:
    replace = [(token, renewals) for token, renewals in command.get("replace", ())]
    started = router.start_live(LivePlan.model_validate(command["plan"]), replace)
    started.token = command.get("token", "")
    return {**started.answer(), "token": started.token}


def _test(command: dict[str, Any], router: StepRouter) -> dict[str, Any]:
    live = router.live
    if live is None:
        return _error("unknown", "no live test was started")
    if command.get("token", live.token) != live.token:
        return _error("unknown", "the live test has ended, and another client has started one")
    if command["action"] == STOP:
        live.stop()
    live.lease.renew()
    return live.answer(command.get("first", 0))


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}
