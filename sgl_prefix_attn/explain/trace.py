"""Requests of a trace window as one batch. Format: Mooncake's, one JSON object a line.

{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id of each 512-token block, ...]}
A block's id stands for its content and everything before it, so requests share a prefix as far as their ids agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from sgl_prefix_attn.explain.batch import BatchDescription, InputError, Segment, describe, first_problem

BLOCK_TOKENS = 512


class TraceRequest(BaseModel):
    """One line of a trace."""

    input_length: Annotated[int, Field(ge=1)]
    output_length: Annotated[int, Field(ge=0)]
    hash_ids: list[int]


def read_window(name: str, window: str, progress: float) -> BatchDescription:
    """Batch of the requests of `window`, "START:COUNT" by their order in the file, decoding at the same time.

    progress: share of its output that each request has generated, 0 to 1.
    """
    if not 0 <= progress <= 1:
        raise InputError(f"progress {progress}: expected a share from 0 to 1")
    start, count = _parse_window(window)
    requests = list(_requests(name, start + count))
    if len(requests) < start + count:
        raise InputError(f"{name}: window {window} ends at request {start + count}; the file has {len(requests)}")
    requests = requests[start:]
    nodes: dict[tuple[int, int, int], int] = {}
    paths = [_path(request, nodes) for request in requests]
    # A decode step has at least its own token beyond the prompt.
    seq_lens = [request.input_length + max(1, round(request.output_length * progress)) for request in requests]
    return describe(f"{name} requests {start} to {start + count - 1}", paths, seq_lens)


def _parse_window(text: str) -> tuple[int, int]:
    start, colon, count = text.partition(":")
    if not colon or not start.isdecimal() or not count.isdecimal() or int(count) == 0:
        raise InputError(f"window {text!r}: expected START:COUNT, for example 0:64 for the first 64 requests")
    return int(start), int(count)


def _requests(name: str, limit: int) -> Iterator[TraceRequest]:
    """The first `limit` requests of the file; a line that is not one is an error with its number."""
    try:
        with open(name, encoding="utf-8") as lines:
            found = 0
            for number, line in enumerate(lines, 1):
                if found == limit:
                    return
                if line.strip():
                    found += 1
                    yield _parse_line(f"{name}:{number}", line)
    except OSError as error:
        raise InputError(f"{name}: cannot read the trace: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: the trace is not UTF-8 text: {error.reason}") from error


def _parse_line(where: str, line: str) -> TraceRequest:
    try:
        request = TraceRequest.model_validate(json.loads(line))
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(error)}") from error
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    blocks = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != blocks:
        raise InputError(
            f"{where}: {len(request.hash_ids)} hash_ids for input_length {request.input_length}; "
            f"expected {blocks}, one for each {BLOCK_TOKENS} tokens"
        )
    return request


def _path(request: TraceRequest, nodes: dict[tuple[int, int, int], int]) -> list[Segment]:
    """Segments of a prompt. A node is known by its parent, its hash id and, for a last and partial block, its end."""
    path: list[Segment] = []
    parent = -1
    for block, hash_id in enumerate(request.hash_ids):
        begin = block * BLOCK_TOKENS
        end = min(begin + BLOCK_TOKENS, request.input_length)
        parent = nodes.setdefault((parent, hash_id, end), len(nodes))
        path.append((parent, begin, end))
    return path
