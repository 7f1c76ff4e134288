"""Pinning commands and their answers, for the HTTP routes and for `EnginePins`.

The models are what clients may say. `client.py` checks it and sends the command with the tokens and the namespace of
this server. It travels in the id of SGLang's request for the internal state. That request exists in every version and
reaches every scheduler: all ranks of each data-parallel copy. Its answer may be any JSON.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from typing import Annotated, Any, TypeGuard

from pydantic import AfterValidator, BaseModel, Field, model_validator

from sgl_prefix_attn.pinning import Pin, PinBudgetError, UnknownPinError
from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import Namespace

ID_PREFIX = "prefixpack-pins:"
ANSWER_KEY = "prefixpack_pins"
COPY_KEY = "data_parallel_rank"
RENEWED_KEY = "renewed"

MAX_TOKENS = 1 << 17  # of a prefix: a scheduler takes some 15 ms for so many
MAX_KEY_BYTES = 256
MAX_LABEL = 200


def _short(key: str) -> str:
    if len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"it can have up to {MAX_KEY_BYTES} bytes")
    return key


Key = Annotated[str, Field(max_length=MAX_KEY_BYTES), AfterValidator(_short)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
# The first wrong token ends the check: there may be a million.
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Count = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]
PinId = Annotated[int, Field(ge=1, lt=1 << 53, strict=True)]


class Prefix(BaseModel):
    """A prefix and its namespace, as requests carry them. A command that is sent has its tokens in any case."""

    token_ids: TokenIds | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    extra_key: Key | None = None
    cache_salt: Key | None = None
    lora_path: Key | None = None

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.extra_key or None, self.cache_salt or None)

    @model_validator(mode="after")
    def _one_of(self) -> Prefix:
        if (self.token_ids is None) == (self.text is None):
            raise ValueError("say which prefix: either text or token_ids")
        return self


class PinCommand(Prefix):
    """Pin a prefix, for `ttl_steps` scheduler steps or until it is released."""

    ttl_steps: Count | None = None
    label: Annotated[str, Field(max_length=MAX_LABEL)] = ""


class ReleaseCommand(Prefix):
    """Release all pins of exactly one prefix."""


class ReleaseOneCommand(BaseModel):
    """Release one pin by its number."""

    id: PinId


class ListCommand(BaseModel):
    """List the pins."""


Command = PinCommand | ReleaseCommand | ReleaseOneCommand | ListCommand
_COMMANDS: dict[str, type[Command]] = {
    kind.__name__: kind for kind in (PinCommand, ReleaseCommand, ReleaseOneCommand, ListCommand)
}


def encode(command: Command) -> str:
    """The id of the internal-state request that carries the command."""
    fields = command.model_dump(exclude_none=True, exclude={"token_ids"})
    if isinstance(command, Prefix):
        assert command.token_ids is not None
        fields["token_ids"] = b64encode(array("i", command.token_ids).tobytes()).decode()
    return ID_PREFIX + json.dumps([type(command).__name__, fields])


def decode(request_id: str) -> Command:
    """The command that an id carries. It was checked where it came from."""
    kind, fields = json.loads(request_id.removeprefix(ID_PREFIX))
    if "token_ids" in fields:
        fields["token_ids"] = array("i", b64decode(fields["token_ids"])).tolist()
    return _COMMANDS[kind].model_construct(**fields)


def is_command(request_id: object) -> TypeGuard[str]:
    """Whether an internal-state request's id carries a command."""
    return isinstance(request_id, str) and request_id.startswith(ID_PREFIX)


def answer(request_id: str, manager: PinningManager | None) -> dict[str, Any]:
    """Executes an encoded command; a refusal is an answer with "error": {"kind", "message"}.

    Kinds: invalid (this server cannot do it), budget (the budget is exceeded), unknown (no such pin), unavailable (the
    cache of this server cannot be pinned).
    """
    if manager is None:
        return _error("unavailable", "this scheduler's prefix cache cannot be pinned: its log says why")
    try:
        return _execute(decode(request_id), manager)
    except PinBudgetError as error:
        return {**_error("budget", str(error)), **({RENEWED_KEY: True} if error.renews else {})}
    except UnknownPinError as error:
        return _error("unknown", str(error))
    except ValueError as error:
        return _error("invalid", str(error))


def _execute(command: Command, manager: PinningManager) -> dict[str, Any]:
    if isinstance(command, ListCommand):
        return {"pins": [_describe(pin, manager) for pin in manager.pins.ledger.pins()], **_totals(manager)}
    if isinstance(command, ReleaseOneCommand):
        return {"released": [manager.release(command.id).id], **_totals(manager)}
    tokens = command.token_ids
    assert tokens is not None
    if isinstance(command, PinCommand):
        made_before = manager.counters.pins_made
        pin = manager.pin(tokens, command.namespace, label=command.label, ttl_steps=command.ttl_steps)
        renewed = {} if manager.counters.pins_made > made_before else {RENEWED_KEY: True}
        return {"pin": _describe(pin, manager), **renewed, **_totals(manager)}
    pins = manager.pins.of(tokens, command.namespace)
    if not pins:
        raise UnknownPinError(f"there is no pin of this prefix of {len(tokens)} tokens")
    return {"released": [manager.release(pin.id).id for pin in pins], **_totals(manager)}


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
