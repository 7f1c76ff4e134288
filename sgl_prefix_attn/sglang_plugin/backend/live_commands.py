"""Commands of live A/B tests, as JSON in the id of SGLang's request for the internal state, as those of pins.

That request reaches every rank between the same two steps, so all ranks begin and end a test at the same step.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from sgl_prefix_attn.routing.live_plan import LivePlan
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import LiveTestError

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
    """Carries out a command; a refusal is an answer with "error": {"kind", "message"}.

    Kinds: disabled (the setting live_tests is off), invalid (unusable fields), refused (this server cannot run the
    test), unknown (there is no test).
    """
    if not state.settings.live_tests:
        return _error("disabled", "live tests are off: start the server with PREFIXPACK_LIVE_TESTS=1")
    record = state.reported()
    if record is None:
        return _error("refused", "no step of this server runs packed")
    router = record.router
    try:
        if command["action"] == START:
            return router.start_live(LivePlan.model_validate(command["plan"])).answer()
        if router.live is None:
            return _error("unknown", "no live test was started")
        if command["action"] == STOP:
            router.live.stop()
        router.live.renew()
        return router.live.answer(int(command.get("first", 0)))
    except LiveTestError as error:
        return _error("refused", str(error))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in error.errors())
        return _error("invalid", problems)
    except (KeyError, TypeError, ValueError) as error:
        return _error("invalid", repr(error))


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}
