"""Clients of pinning: a Python interface for `Engine`, and routes on SGLang's HTTP server.

Both send commands (commands.py) to the schedulers through SGLang's tokenizer manager.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from sgl_prefix_attn.sglang_plugin import http_routes
from sgl_prefix_attn.sglang_plugin.pinning.commands import (
    ANSWER_KEY,
    COPY_KEY,
    MAX_TOKENS,
    RENEWED_KEY,
    AnnounceCommand,
    Command,
    ListCommand,
    PinCommand,
    ReleaseCommand,
    encode,
)

logger = logging.getLogger(__name__)

PATH = "/prefixpack/pins"
_NO_ANSWER = {
    "error": {
        "kind": "unavailable",
        "message": "the schedulers have no hooks for pins: set PREFIXPACK_PIN_BUDGET_PERCENT before starting SGLang; "
        "if it is set, SGLang's launcher loads no plug-ins in them (docs/pinning.md, limits)",
    }
}
_HTTP_STATUS = {"invalid": 400, "unknown": 404, "budget": 409, "unavailable": 503, "failed": 500}


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
    ) -> list[dict[str, Any]]:
        """Keeps a prefix cached, for `ttl_steps` scheduler steps or until it is released.

        Args:
            token_ids: the prefix, up to 2^20 token ids; or give `text`.
            text: the prefix as a text.
            ttl_steps: scheduler steps after which the pin ends, from 1 on; None: never.
            label: tells pins of one prefix apart, up to 200 characters. With the same one the pin is renewed.
            extra_key: as requests carry it, for example a LoRA adapter; None: none.
            cache_salt: as requests carry it; None: none.

        Returns:
            For each copy a dict with `pin`, `pinned_tokens` and `budget_tokens`; `renewed` if the pin was there.

        Raises:
            ValueError: not exactly one of token_ids and text is given, or a value is unusable.
            PinningError: a copy refused: the budget is exceeded, or its cache cannot be pinned.
        """
        manager = self._engine.tokenizer_manager
        ids = _one_of(manager, token_ids, text)
        command = PinCommand(
            token_ids=ids, ttl_steps=ttl_steps, label=label, extra_key=extra_key, cache_salt=cache_salt
        )
        return self._run(command)

    def release(
        self,
        pin_id: int | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        text: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> list[dict[str, Any]]:
        """Ends one pin by its id, or all pins of exactly one prefix.

        Args:
            pin_id: `id` of a pin; the other arguments are not read then.
            token_ids: the prefix as it was pinned; or give `text`.
            text: the prefix as a text.
            extra_key: as it was pinned with.
            cache_salt: as it was pinned with.

        Returns:
            For each copy a dict with `released`, the ids, and the totals `pinned_tokens` and `budget_tokens`.

        Raises:
            ValueError: neither an id nor exactly one of token_ids and text is given.
            PinningError: a copy has no such pin.
        """
        if pin_id is not None:
            return self._run(ReleaseCommand(id=pin_id))
        ids = _one_of(self._engine.tokenizer_manager, token_ids, text)
        return self._run(ReleaseCommand(token_ids=ids, extra_key=extra_key, cache_salt=cache_salt))

    def announce(
        self,
        uses: int,
        token_ids: Sequence[int] | None = None,
        *,
        text: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> list[dict[str, Any]]:
        """Announces `uses` more requests that share this prefix, and none after them. Needs retention.

        The prefix is kept before all others until the last of them is admitted; then it is evicted first.

        Args:
            uses: requests to come, from 1 on.
            token_ids: the prefix, up to 2^20 token ids; or give `text`.
            text: the prefix as a text.
            extra_key: as the requests will carry it.
            cache_salt: as the requests will carry it.

        Returns:
            For each copy a dict with `pinned_tokens` and `budget_tokens`.

        Raises:
            ValueError: not exactly one of token_ids and text is given, or a value is unusable.
            PinningError: a copy refused, for example because retention is off.
        """
        ids = _one_of(self._engine.tokenizer_manager, token_ids, text)
        return self._run(AnnounceCommand(token_ids=ids, uses=uses, extra_key=extra_key, cache_salt=cache_salt))

    def pins(self) -> list[dict[str, Any]]:
        """All pins.

        Returns:
            For each copy a dict with `pins`, each as {"id", "label", "tokens", "cached_tokens", "steps_left"}, oldest
            first, and the totals `pinned_tokens` and `budget_tokens`.
        """
        return self._run(ListCommand())

    def _run(self, command: Command) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._engine.loop.run_until_complete(
            send(self._engine.tokenizer_manager, command)
        )
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
        for answer in await _ask(manager, ReleaseCommand(id=pin_id))
        if "error" in answer and answer["error"]["kind"] != "unknown"
    ]
    if failed:
        return f"the others keep pin {pin_id}, because it could not be released: {'; '.join(failed)}"
    return "the pin was released on the others"


def token_ids_of(manager: Any, text: str) -> list[int]:
    """Tokens of a text, as of a prompt. Raises ValueError if the server has no tokenizer."""
    tokenizer = manager.tokenizer
    if tokenizer is None:
        raise ValueError("this server has no tokenizer (--skip-tokenizer-init): give token_ids")
    return [int(token) for token in tokenizer.encode(text)]


def add_routes(app: Any, manager_of: Any) -> None:
    """Adds the routes to SGLang's FastAPI application.

    GET lists, POST pins {"text" | "token_ids", "ttl_steps", "label", "extra_key", "cache_salt"}, DELETE releases
    {"id" | "text" | "token_ids"}.

    Args:
        manager_of: returns the tokenizer manager; called without arguments for each request.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def answered(make: Any) -> Any:
        try:
            manager = manager_of()
            return {"schedulers": await send(manager, make(manager))}
        except PinningError as error:
            return _refused(_HTTP_STATUS.get(error.kind, 500), error.kind, str(error))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
            return _refused(400, "invalid", problems)
        except ValueError as error:
            return _refused(400, "invalid", str(error))

    def _refused(status: int, kind: str, message: str) -> Any:
        return JSONResponse({"error": {"kind": kind, "message": message}}, status_code=status)

    async def list_pins() -> Any:
        return await answered(lambda manager: ListCommand())

    async def pin(request: Request) -> Any:
        body = await _object(request)
        return await answered(lambda manager: PinCommand(**_with_token_ids(manager, body)))

    async def release(request: Request) -> Any:
        body = await _object(request)
        return await answered(
            lambda manager: ReleaseCommand(**(_with_token_ids(manager, body) if "id" not in body else body))
        )

    http_routes.add_endpoints(app, PATH, {"GET": list_pins, "POST": pin, "DELETE": release})


def add_routes_to_server() -> None:
    """Adds the routes to SGLang's HTTP server in this process."""
    server = http_routes.server_without(PATH)
    if server is not None:
        add_routes(*server)


def _one_of(manager: Any, token_ids: Any, text: Any) -> Any:
    """The token ids, tokenised from the text if that is given; the command validates them.

    Raises:
        ValueError: not exactly one is given, or there are too many tokens.
    """
    if (token_ids is None) == (text is None):
        raise ValueError("say which prefix: either text or token_ids")
    if text is not None:
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r}: it has to be a string")
        text.encode()  # raises ValueError for half a surrogate pair, where tokenizers raise unclear errors
        token_ids = token_ids_of(manager, text)
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
        return token_ids
    if len(token_ids) > MAX_TOKENS:  # before they are copied and sent to every scheduler
        raise ValueError(f"token_ids has {len(token_ids)} tokens: a prefix can have up to {MAX_TOKENS}")
    return list(token_ids)


def _with_token_ids(manager: Any, body: dict[str, Any]) -> dict[str, Any]:
    fields = dict(body)
    fields["token_ids"] = _one_of(manager, fields.get("token_ids"), fields.pop("text", None))
    return fields


async def _object(request: Any) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):  # nested too deeply
        body = None
    return body if isinstance(body, dict) else {"body": "not a JSON object"}
