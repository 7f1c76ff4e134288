"""Reads batch files in OpenAI's format: one request a line, for /v1/completions or /v1/chat/completions.

Every line is checked by itself; what is wrong with one is reported with its number and does not touch the others.
What stands in a body is for SGLang's request classes to understand (`sglang_requests.py`).
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from sgl_prefix_attn.core.files import read_lines

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_MOST_PROBLEMS = 5  # of a line that its error tells; a prompt may have one for each token
_STRING = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?', re.DOTALL)  # of JSON; a key if a colon follows


@dataclass(frozen=True)
class LineError:
    """An error of a line: `code` for programs, `message` for people, `custom_id` if it is readable."""

    line: int
    code: str
    message: str
    custom_id: str | None = None


_ALTERNATIVES = ("str", "int", "float", "bool", "dict", "list")  # of unions, as pydantic names them


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    custom_id: Annotated[StrictStr, Field(min_length=1)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchRequest:
    """A line in the form of a request, and its text, whose body SGLang is to understand. `line` counts from 1."""

    line: int
    custom_id: str
    url: str
    text: bytes


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
        return LineError(number, "duplicate_key", f"an object has the key {shortened(repeated)} twice", known)
    try:
        line = _Line.model_validate(raw)
    except ValidationError as error:
        unknown = any(detail["type"] == "extra_forbidden" for detail in error.errors(include_url=False))
        code = "unknown_field" if unknown else "invalid_request"
        return LineError(number, code, problems_of(error, known=list(_Line.model_fields)), custom_id)
    return BatchRequest(number, line.custom_id, line.url, text)


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


def problems_of(error: ValidationError, prefix: str = "", known: Sequence[str] = ()) -> str:
    """What pydantic has against an object, in words. Names of `known` are offered for unknown ones."""
    problems = []
    for detail in error.errors(include_url=False, include_context=False):
        # Unions report each alternative; their names, as str, list[int] and Function, are not part of the field.
        place = [
            str(part)
            for part in detail["loc"]
            if isinstance(part, int) or (part.isidentifier() and part.islower() and part not in _ALTERNATIVES)
        ]
        name = prefix + ".".join(place)
        if detail["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
            problems.append(f"{name} is an unknown field" + (f"; did you mean {near[0]}?" if near else ""))
        elif detail["type"] == "missing":
            problems.append(f"{name} is missing")
        elif not place:
            problems.append(detail["msg"].removeprefix("Value error, "))
        else:
            problems.append(f"{name} = {shortened(detail['input'])}: {detail['msg']}")
    told = [_cut(problem, 300) for problem in dict.fromkeys(problems)]
    if len(told) > _MOST_PROBLEMS:
        told[_MOST_PROBLEMS:] = [f"and {len(told) - _MOST_PROBLEMS} more"]
    return "; ".join(told)


def shortened(value: Any, limit: int = 60) -> str:
    """A value as an error shows it."""
    try:
        text = repr(value)
    except RecursionError:  # JSON can be nested deeper than Python can print
        text = reprlib.repr(value)
    return _cut(text, limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
