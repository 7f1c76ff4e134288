"""Clients of pinning: a Python interface for `Engine`, and routes on SGLang's HTTP server.

Both send commands (commands.py) to the schedulers through SGLang's tokenizer manager.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from sgl_prefix_attn.sglang_plugin.compat import http_routes
from sgl_prefix_attn.sglang_plugin.compat.http_routes import RequestError
from sgl_prefix_attn.sglang_plugin.pinning.commands import (
    ANSWER_KEY,
    COPY_KEY,
    MAX_TOKENS,
    RENEWED_KEY,
    Command,
    ListCommand,
    PinCommand,
    Prefix,
    ReleaseCommand,
    ReleaseOneCommand,
    encode,
)

logger = logging.getLogger(__name__)

PATH = "/prefixpack/pins"
# Of a body, for each token of the longest prefix. JSON may escape a character in six bytes, and a token id has up to
# seven digits.
BYTES_PER_TOKEN = 16
CHARACTERS_PER_TOKEN = 8  # of a text: encoding takes half a second of a core for one megabyte
REST_OF_BODY_BYTES = 16 << 10
_NO_ANSWER = {
    "error": {
        "kind": "unavailable",
        "message": "the schedulers have no hooks for pins: set PREFIXPACK_PIN_BUDGET_PERCENT before starting SGLang; "
        "if it is set, SGLang's launcher loads no plug-ins in them (docs/pinning.md, limits)",
    }
}
_STATUS = {"invalid": 400, "unknown": 404, "budget": 409, "unavailable": 503, "failed": 500}


class PinningError(RuntimeError):
    """The schedulers refused a command. `kind` is as in `commands.answer`, or "failed"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EnginePins:
    """Pins in the prefix cache of an `sglang.Engine` of this process.

    A prefix is given as `token_ids` or as `text`; a text is tokenised as SGLang tokenises prompts. Pin up to a clear
    boundary, for example the end of a line: the last tokens of the text may be others where a prompt continues it.

    Every method returns one answer per data-parallel copy of the model, a dict as the HTTP endpoint gives it
    (docs/pinning.md), and raises PinningError if a copy refused.

    Args:
        engine: an `sglang.Engine` of this process.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def pin(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        text: str | None = None,
        ttl_steps: int | None = None,
        label: str = "",
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora_path: str | None = None,
    ) -> list[dict[str, Any]]:
        """Keeps a prefix cached, for `ttl_steps` scheduler steps or until it is released.

        Args:
            token_ids: the prefix, up to the context length of the model and 131,072; or give `text`.
            text: the prefix as a text.
            ttl_steps: scheduler steps after which the pin ends, from 1 on; None: never.
            label: tells pins of one prefix apart, up to 200 characters. With the same one the pin is renewed.
            extra_key: as requests carry it; None: none.
            cache_salt: as requests carry it; None: none.
            lora_path: name of a loaded LoRA adapter, as requests carry it; None: none.

        Returns:
            For each copy a dict with `pin`, `pinned_tokens` and `budget_tokens`; `renewed` if the pin was there.

        Raises:
            ValueError: not exactly one of token_ids and text is given, or a value is unusable.
            PinningError: a copy refused: the budget is exceeded, or its cache cannot be pinned.
        """
        fields = {"ttl_steps": ttl_steps, "label": label, "extra_key": extra_key, "cache_salt": cache_salt}
        return self._run(PinCommand, token_ids=token_ids, text=text, lora_path=lora_path, **fields)

    def release(
        self,
        pin_id: int | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        text: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora_path: str | None = None,
    ) -> list[dict[str, Any]]:
        """Ends one pin by its id, or all pins of exactly one prefix.

        Args:
            pin_id: `id` of a pin; the other arguments are not read then.
            token_ids: the prefix as it was pinned; or give `text`.
            text: the prefix as a text.
            extra_key: as it was pinned with.
            cache_salt: as it was pinned with.
            lora_path: as it was pinned with.

        Returns:
            For each copy a dict with `released`, the ids, and the totals `pinned_tokens` and `budget_tokens`.

        Raises:
            ValueError: neither an id nor exactly one of token_ids and text is given.
            PinningError: a copy has no such pin.
        """
        if pin_id is not None:
            return self._run(ReleaseOneCommand, id=pin_id)
        fields = {"extra_key": extra_key, "cache_salt": cache_salt, "lora_path": lora_path}
        return self._run(ReleaseCommand, token_ids=token_ids, text=text, **fields)

    def pins(self) -> list[dict[str, Any]]:
        """All pins.

        Returns:
            For each copy a dict with `pins`, each as {"id", "label", "tokens", "cached_tokens", "steps_left"}, oldest
            first, and the totals `pinned_tokens` and `budget_tokens`.
        """
        return self._run(ListCommand)

    def _run(self, kind: type[Command], **fields: Any) -> list[dict[str, Any]]:
        manager = self._engine.tokenizer_manager
        command = command_of(manager, kind, {name: value for name, value in fields.items() if value is not None})
        answers: list[dict[str, Any]] = self._engine.loop.run_until_complete(send(manager, command))
        return answers


async def send(manager: Any, command: Command) -> list[dict[str, Any]]:
    """Sends a command to all schedulers; returns one answer per data-parallel copy.

    A new pin that one copy refuses is released on the copies that made it. A pin that a copy had before stays.

    Raises:
        PinningError: a copy refused; the message names the copies unless all did.
    """
    answers = await _ask(manager, command)
    refused = [answer for answer in answers if "error" in answer]
    if not refused:
        return answers
    message = refused[0]["error"]["message"]
    if len(refused) < len(answers):
        message = "; ".join(
            f"copy {answer.get(COPY_KEY, number)} of the model refused: {answer['error']['message']}"
            for number, answer in enumerate(answers)
            if "error" in answer
        )
        message += "; " + await _undo(manager, command, answers)
    raise PinningError(refused[0]["error"]["kind"], message)


async def _ask(manager: Any, command: Command) -> list[dict[str, Any]]:
    states = await http_routes.internal_states(manager, encode(command))
    return [state.get(ANSWER_KEY, _NO_ANSWER) for state in states]


async def _undo(manager: Any, command: Command, answers: list[dict[str, Any]]) -> str:
    """Releases a new pin on the copies that made it after others refused; returns a sentence on the outcome."""
    if not isinstance(command, PinCommand):
        return "the others did as asked"
    (pin_id,) = {answer["pin"]["id"] for answer in answers if "error" not in answer}
    if any(answer.get(RENEWED_KEY) for answer in answers):  # a release would also end the pin of who refused
        return f"the others keep pin {pin_id}, which was pinned before"
    failed = [
        answer["error"]["message"]
        for answer in await _ask(manager, ReleaseOneCommand(id=pin_id))
        if "error" in answer and answer["error"]["kind"] != "unknown"
    ]
    if failed:
        return f"the others keep pin {pin_id}, because it could not be released: {'; '.join(failed)}"
    return "the pin was released on the others"


def most_tokens(manager: Any) -> int:
    """Tokens that a prefix can have on this server."""
    return min(int(manager.context_len), MAX_TOKENS)


def command_of(manager: Any, kind: type[Command], fields: dict[str, Any]) -> Command:
    """The command from what a client said, with the tokens and the namespace that this server has for it.

    Raises:
        RequestError: a value is unusable.
    """
    ids, most = fields.get("token_ids"), most_tokens(manager)
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        if len(ids) > most:  # before they are copied
            raise _too_long(len(ids), most)
        fields = {**fields, "token_ids": list(ids)}
    command = http_routes.checked(kind, fields)
    if not isinstance(command, Prefix):
        return command
    ids = command.token_ids
    if ids is None:
        assert command.text is not None
        ids = token_ids_of(manager, command.text)
    vocabulary = manager.model_config.vocab_size
    if max(ids) >= vocabulary:
        raise RequestError(f"token_ids: {max(ids)} is no token of this model: they are 0 to {vocabulary - 1}")
    found = {"token_ids": ids, "text": None, "extra_key": _extra_key(manager, command), "lora_path": None}
    return command.model_copy(update=found)


def _too_long(tokens: int, most: int) -> RequestError:
    return RequestError(f"token_ids has {tokens} tokens: a prefix of this server can have up to {most}")


def token_ids_of(manager: Any, text: str) -> list[int]:
    """Tokens of a text, as of a prompt.

    SGLang encodes prompts with the same tokenizer in another thread. That is safe while no call changes its settings.

    Raises:
        RequestError: the text is too long or has no tokens, or the server has no tokenizer.
    """
    most = most_tokens(manager)
    if manager.tokenizer is None:
        raise RequestError("this server has no tokenizer (--skip-tokenizer-init): give token_ids")
    if len(text) > CHARACTERS_PER_TOKEN * most:
        raise RequestError(f"text has {len(text)} characters: at most {CHARACTERS_PER_TOKEN * most} are accepted")
    ids = manager.tokenizer.encode(text)
    if len(ids) == 0:
        raise RequestError("text has no tokens")
    if len(ids) > most:
        raise _too_long(len(ids), most)
    return [int(token) for token in ids]


def _extra_key(manager: Any, prefix: Prefix) -> str | None:
    """The extra key of requests with this namespace: SGLang appends the id of their LoRA adapter.

    Raises:
        RequestError: the adapter is not loaded, or its name is given as an extra key, which holds nothing.
    """
    if prefix.extra_key in manager.lora_ref_cache:
        raise RequestError(f"extra_key {prefix.extra_key!r} is the name of a LoRA adapter: give it as lora_path")
    if not prefix.lora_path:
        return prefix.extra_key
    adapter = manager.lora_registry.get_all_adapters().get(prefix.lora_path)
    if adapter is None:
        raise RequestError(f"lora_path: no LoRA adapter {prefix.lora_path!r} is loaded")
    return f"{prefix.extra_key or ''}{adapter.lora_id}"


class _NoQuery(BaseModel):
    """No request about pins has parameters in its URL."""


def add_routes(app: Any, manager_of: Any) -> None:
    """Adds the routes to SGLang's FastAPI application.

    GET lists, POST pins with the fields of PinCommand, DELETE releases with {"id"} or the fields of ReleaseCommand.

    Args:
        manager_of: returns the tokenizer manager; called without arguments for each request.
    """
    bodies = http_routes.Bodies()

    async def answered(command: Command) -> Any:
        try:
            return {"schedulers": await send(manager_of(), command)}
        except PinningError as error:
            raise RequestError(str(error), status=_STATUS.get(error.kind, 500), kind=error.kind) from error

    async def list_pins(request: Any) -> Any:
        http_routes.query_of(request, _NoQuery)
        return await answered(ListCommand())

    async def with_body(request: Any) -> Any:
        http_routes.query_of(request, _NoQuery)
        manager = manager_of()

        def command(body: dict[str, Any]) -> Command:
            if request.method == "POST":
                return command_of(manager, PinCommand, body)
            return command_of(manager, ReleaseOneCommand if "id" in body else ReleaseCommand, body)

        tokens = most_tokens(manager)
        most = BYTES_PER_TOKEN * tokens + REST_OF_BODY_BYTES
        # A list that is a little too long is told so by its length.
        return await answered(await bodies.read(request, most, command, 2 * tokens + http_routes.MOST_STRINGS))

    http_routes.add_endpoints(app, PATH, {"GET": list_pins, "POST": with_body, "DELETE": with_body})


def add_routes_to_server() -> None:
    """Adds the routes to SGLang's HTTP server in this process."""
    server = http_routes.server_without(PATH)
    if server is not None:
        add_routes(*server)
