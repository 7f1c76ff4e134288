"""Pinning commands and their answers, as JSON, for the HTTP routes and for `EnginePins`.

A command travels in the id of SGLang's request for the internal state. That request exists in every version and reaches
every scheduler: all ranks of each data-parallel copy. Its answer may be any JSON.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sgl_prefix_attn.pinning import Pin, PinBudgetError, UnknownPinError
from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import Namespace

ID_PREFIX = "prefixpack-pins:"
ANSWER_KEY = "prefixpack_pins"
COPY_KEY = "data_parallel_rank"
RENEWED_KEY = "renewed"

TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
MAX_TOKENS = 1 << 20  # tokens of a prefix; above all context lengths
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
Count = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]


class _Prefix(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token_ids: TokenIds
    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.extra_key or None, self.cache_salt or None)


class PinCommand(_Prefix):
    """Pin a prefix, for `ttl_steps` scheduler steps or until it is released."""

    command: Literal["pin"] = "pin"
    ttl_steps: Count | None = None
    label: Annotated[str, Field(max_length=200)] = ""


class ReleaseCommand(BaseModel):
    """Release one pin by its number, or all pins of exactly one prefix."""

    model_config = ConfigDict(extra="forbid")

    command: Literal["release"] = "release"
    id: int | None = None
    token_ids: TokenIds | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _one_of(self) -> ReleaseCommand:
        if (self.id is None) == (self.token_ids is None):
            raise ValueError("say which pin: either its id, or its text or token_ids")
        return self


class AnnounceCommand(_Prefix):
    """Announce that an offline group will send `uses` more requests that share this prefix."""

    command: Literal["announce"] = "announce"
    uses: Count


class ListCommand(BaseModel):
    """List the pins."""

    model_config = ConfigDict(extra="forbid")

    command: Literal["list"] = "list"


Command = PinCommand | ReleaseCommand | AnnounceCommand | ListCommand
_COMMANDS: dict[str, type[PinCommand] | type[ReleaseCommand] | type[AnnounceCommand] | type[ListCommand]] = {
    "announce": AnnounceCommand,
    "pin": PinCommand,
    "release": ReleaseCommand,
    "list": ListCommand,
}


def encode(command: Command) -> str:
    """The id of the internal-state request that carries the command."""
    return ID_PREFIX + command.model_dump_json(exclude_none=True)


def is_command(request_id: object) -> TypeGuard[str]:
    """Whether an internal-state request's id carries a command."""
    return isinstance(request_id, str) and request_id.startswith(ID_PREFIX)


def answer(request_id: str, manager: PinningManager | None) -> dict[str, Any]:
    """Executes an encoded command; a refusal is an answer with "error": {"kind", "message"}.

    Kinds: invalid (unusable command), budget (the budget is exceeded), unknown (no such pin), unavailable (the cache of
    this server cannot be pinned).
    """
    if manager is None:
        return _error("unavailable", "this scheduler's prefix cache cannot be pinned: its log says why")
    try:
        fields = json.loads(request_id.removeprefix(ID_PREFIX))
        command = _COMMANDS[fields["command"]].model_validate(fields)
    except (ValidationError, json.JSONDecodeError, KeyError, TypeError) as error:
        return _error("invalid", str(error))
    try:
        return _execute(command, manager)
    except PinBudgetError as error:
        return {**_error("budget", str(error)), **({RENEWED_KEY: True} if error.renews else {})}
    except UnknownPinError as error:
        return _error("unknown", str(error))
    except ValueError as error:
        return _error("invalid", str(error))


def _execute(command: Command, manager: PinningManager) -> dict[str, Any]:
    if isinstance(command, PinCommand):
        made_before = manager.counters.pins_made
        pin = manager.pin(command.token_ids, command.namespace, label=command.label, ttl_steps=command.ttl_steps)
        renewed = {} if manager.counters.pins_made > made_before else {RENEWED_KEY: True}
        return {"pin": _describe(pin, manager), **renewed, **_totals(manager)}
    if isinstance(command, AnnounceCommand):
        manager.announce(command.token_ids, command.uses, command.namespace)
        return _totals(manager)
    if isinstance(command, ListCommand):
        return {"pins": [_describe(pin, manager) for pin in manager.pins.ledger.pins()], **_totals(manager)}
    if command.id is not None:
        released = [manager.release(command.id).id]
    else:
        assert command.token_ids is not None
        namespace = Namespace(command.extra_key or None, command.cache_salt or None)
        pins = manager.pins.of(command.token_ids, namespace)
        if not pins:
            raise UnknownPinError(f"there is no pin of this prefix of {len(command.token_ids)} tokens")
        released = [manager.release(pin.id).id for pin in pins]
    return {"released": released, **_totals(manager)}


def _describe(pin: Pin, manager: PinningManager) -> dict[str, Any]:
    return {
        "id": pin.id,
        "label": pin.label,
        "tokens": len(pin.tokens),
        "cached_tokens": manager.pins.locked_tokens(pin.id),
        "steps_left": None if pin.expires is None else pin.expires - manager.pins.ledger.step,
    }


def _totals(manager: PinningManager) -> dict[str, Any]:
    return {"pinned_tokens": manager.pins.ledger.pinned_tokens, "budget_tokens": manager.pins.ledger.budget}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}
