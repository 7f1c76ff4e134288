"""Reads request traces in Mooncake's format: one JSON object a line, block hashes instead of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from sgl_prefix_attn.core.files import read_lines

BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A trace file cannot be used. The message names the file, the line, and what is wrong there."""


class TraceRow(BaseModel):
    """One request. timestamp: arrival in milliseconds. hash_ids: one id per block of 512 prompt tokens.

    Equal ids stand for equal tokens in the block and in all blocks before it.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    timestamp: NonNegativeInt
    input_length: PositiveInt
    output_length: NonNegativeInt
    hash_ids: list[NonNegativeInt]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Rows of a trace file, the first `limit` of them. Raises TraceError for a file or line that cannot be used."""
    try:
        rows = list(islice(_rows(path), limit))
    except OSError as error:
        raise TraceError(f"{path}: cannot read the trace: {error.strerror}") from error
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    return rows


def _rows(path: Path) -> Iterator[TraceRow]:
    previous = 0
    for number, line in read_lines(path):
        where = f"{path}, line {number}"
        try:
            row = TraceRow.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise TraceError(f"{where}: {f'{key}: ' if key else ''}{first['msg']}") from error
        blocks = math.ceil(row.input_length / BLOCK_TOKENS)
        if len(row.hash_ids) != blocks:
            raise TraceError(
                f"{where}: input_length {row.input_length} is {blocks} blocks of {BLOCK_TOKENS} tokens, "
                f"but hash_ids has {len(row.hash_ids)}"
            )
        if row.timestamp < previous:
            raise TraceError(f"{where}: timestamp {row.timestamp} is before the line above it ({previous})")
        previous = row.timestamp
        yield row
