"""Reads batch files in OpenAI's format: one request a line, for /v1/completions or /v1/chat/completions.

Every line is checked by itself; what is wrong with one is reported with its number and does not touch the others.
Prompts of completions may be token ids. Beyond OpenAI's fields those of SGLang are taken that shape sampling.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from sgl_prefix_attn.core.files import read_lines

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's API has it

# SGLang stores 32-bit numbers (seeds: 64-bit). Its scheduler crashes on larger ones.
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
TokenId = Annotated[StrictInt, Field(ge=0, le=_INT32_MAX)]
Count = Annotated[StrictInt, Field(ge=1, le=_INT32_MAX)]
# OpenAI's range. SGLang's scheduler crashes on a bias beyond 32-bit floats and on infinite logits.
Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]
_ALTERNATIVES = ("str", "int", "float", "bool")  # of unions, as pydantic names them
_MOST_PROBLEMS = 5  # of a line that its error tells; a prompt may have one for each token
_STRING = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?', re.DOTALL)  # of JSON; a key if a colon follows
_LEAST_PENALTY = 1e-6  # divisor of logits; SGLang accepts any number above 0


@dataclass(frozen=True)
class LineError:
    """An error of a line: `code` for programs, `message` for people, `custom_id` if it is readable."""

    line: int
    code: str
    message: str
    custom_id: str | None = None


class _Body(BaseModel):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    temperature: StrictFloat = Field(1.0, ge=0, le=2)
    top_p: StrictFloat = Field(1.0, gt=0, le=1)
    n: StrictInt = Field(1, ge=1, le=128)
    stop: StrictStr | list[StrictStr] | None = None
    seed: Annotated[StrictInt, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)] | None = None
    presence_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    frequency_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Bias] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    stream: Literal[False] = False
    # SGLang's
    top_k: Annotated[StrictInt, Field(ge=-1, le=_INT32_MAX)] | None = None
    min_p: StrictFloat | None = Field(None, ge=0, le=1)
    repetition_penalty: StrictFloat | None = Field(None, ge=_LEAST_PENALTY, le=2)
    min_tokens: StrictInt = Field(0, ge=0, le=_INT32_MAX)
    ignore_eos: StrictBool = False
    stop_token_ids: list[TokenId] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Without the optional fields that are null, as OpenAI's schema has it."""
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in values.items() if value is not None or name not in optional}

    def sampling(self) -> dict[str, Any]:
        """SGLang's sampling parameters, without max_new_tokens."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "n": self.n,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "logit_bias": self.logit_bias,
            "sampling_seed": self.seed,
        }
        return {name: value for name, value in values.items() if value is not None}


class CompletionBody(_Body):
    """Body of a /v1/completions request; a prompt is text or token ids."""

    prompt: StrictStr | Annotated[list[TokenId], Field(min_length=1)]
    max_tokens: Count = DEFAULT_COMPLETION_TOKENS
    echo: Literal[False] = False
    logprobs: Literal[0, None] = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class ChatBody(_Body):
    """Body of a /v1/chat/completions request. Without a limit it may use up the context.

    messages: contents are text, those given in parts joined; None only in an assistant's message with tool calls.
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: Literal[False, None] = None

    @model_validator(mode="after")
    def _messages_are_text(self) -> ChatBody:
        for number, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"messages[{number}] needs a role and a content")
            if message["content"] is None and message["role"] == "assistant" and message.get("tool_calls"):
                continue
            message["content"] = _text(message["content"], f"messages[{number}].content")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _text(content: Any, name: str) -> str:
    """A message's content as one text. Raises ValueError, which names it, for anything but text and parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"{name} = {_shortened(content)}: expected text, or a list of parts of text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"{name}[{number}] is {_shortened(kind or part)}; only parts with the type 'text' can run offline"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{name}[{number}].text = {_shortened(part.get('text'))}: expected text")
        texts.append(part["text"])
    return " ".join(texts)  # as SGLang's server does for templates without parts


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    custom_id: Annotated[StrictStr, Field(min_length=1)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


_BODIES: dict[str, type[CompletionBody] | type[ChatBody]] = {COMPLETIONS: CompletionBody, CHAT: ChatBody}


@dataclass(frozen=True)
class BatchRequest:
    """A usable line. `line` counts from 1."""

    line: int
    custom_id: str
    url: str
    body: CompletionBody | ChatBody


def read_batch(path: Path) -> Iterator[BatchRequest | LineError]:
    """The requests and errors of a batch file, in its order; blank lines are skipped.

    Raises OSError when the file cannot be read.
    """
    first_line: dict[str, int] = {}
    for number, text in read_lines(path):
        entry = parse_line(number, text)
        if isinstance(entry, BatchRequest):
            earlier = first_line.setdefault(entry.custom_id, number)
            if earlier != number:
                entry = LineError(
                    number,
                    "duplicate_custom_id",
                    f"custom_id {entry.custom_id!r} is that of line {earlier} already; each needs its own",
                    entry.custom_id,
                )
        yield entry


def parse_line(number: int, text: bytes) -> BatchRequest | LineError:
    """One line of a batch file."""
    try:
        raw = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return LineError(number, "malformed_json", f"not JSON: {error}")
    if not isinstance(raw, dict):
        return LineError(number, "malformed_json", f"a JSON {type(raw).__name__}, expected an object with a custom_id")
    custom_id = raw.get("custom_id") if isinstance(raw.get("custom_id"), str) else None
    try:
        repeated = _repeated_key(text)
    except RecursionError:
        return LineError(number, "malformed_json", "it is nested too deeply", custom_id)
    if repeated is not None:
        known = None if repeated == "custom_id" else custom_id
        return LineError(number, "duplicate_key", f"an object has the key {_shortened(repeated)} twice", known)
    try:
        line = _Line.model_validate(raw)
    except ValidationError as error:
        return _invalid(number, custom_id, error, _Line, "")
    body_type = _BODIES[line.url]
    try:
        return BatchRequest(number, line.custom_id, line.url, body_type.model_validate(line.body))
    except ValidationError as error:
        return _invalid(number, custom_id, error, body_type, "body.")


def _repeated_key(text: bytes) -> str | None:
    """A key that an object of a JSON text has twice. The parser would take the last one."""
    keys = [found[1] for found in _STRING.finditer(text) if found[2]]
    if len(set(keys)) == len(keys) and not any(b"\\" in key for key in keys):
        return None
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)

    json.loads(text, object_pairs_hook=note, parse_int=str)
    return repeated[0] if repeated else None


def _invalid(
    number: int, custom_id: str | None, error: ValidationError, model: type[BaseModel], prefix: str
) -> LineError:
    problems, unknown = [], False
    for detail in error.errors(include_url=False, include_context=False):
        # Unions report each alternative; their names, as str and list[int], are not part of the field.
        place = [
            str(part)
            for part in detail["loc"]
            if isinstance(part, int) or (part.isidentifier() and part not in _ALTERNATIVES)
        ]
        name = prefix + ".".join(place)
        if detail["type"] == "extra_forbidden":
            unknown = True
            near = difflib.get_close_matches(str(detail["loc"][-1]), list(model.model_fields), n=1)
            problems.append(f"{name} is an unknown field" + (f"; did you mean {near[0]}?" if near else ""))
        elif detail["type"] == "missing":
            problems.append(f"{name} is missing")
        elif not place:
            problems.append(detail["msg"].removeprefix("Value error, "))
        else:
            problems.append(f"{name} = {_shortened(detail['input'])}: {detail['msg']}")
    told = [_cut(problem, 300) for problem in dict.fromkeys(problems)]
    if len(told) > _MOST_PROBLEMS:
        told[_MOST_PROBLEMS:] = [f"and {len(told) - _MOST_PROBLEMS} more"]
    return LineError(number, "unknown_field" if unknown else "invalid_request", "; ".join(told), custom_id)


def _shortened(value: Any, limit: int = 60) -> str:
    try:
        text = repr(value)
    except RecursionError:  # JSON can be nested deeper than Python can print
        text = reprlib.repr(value)
    return _cut(text, limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
