"""A batch to explain, and two ways to describe one: a uniform tree in one argument, or any forest in a JSON file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgl_prefix_attn.core.files import read_text

Segment = tuple[int, int, int]  # (node id, first position, one past the last position)

MAX_REQUESTS = 65_536
MAX_POSITIONS = 2**31 - 1


class InputError(ValueError):
    """An unusable description. The message names the place, the value, and what is expected."""


@dataclass(frozen=True)
class BatchDescription:
    """Requests of one step.

    paths[r]: segments from position 0 on, contiguous; requests share a segment when its node id is the same.
    Positions of request r beyond its path are its own. seq_lens, query_lens: int64 [requests], KV length with the
    step's own tokens included, and how many tokens that are (1: decode).
    """

    title: str
    paths: list[list[Segment]]
    seq_lens: npt.NDArray[np.int64]
    query_lens: npt.NDArray[np.int64]

    @property
    def num_requests(self) -> int:
        return len(self.paths)

    @property
    def is_decode(self) -> bool:
        return bool((self.query_lens == 1).all())


def describe(
    title: str, paths: list[list[Segment]], seq_lens: Sequence[int], query_lens: Sequence[int] | None = None
) -> BatchDescription:
    """A checked description. Raises InputError that names the request; order of segments is checked by the forest."""
    query_lens = [1] * len(paths) if query_lens is None else query_lens
    if not paths:
        raise InputError(f"{title}: the batch has no requests")
    if len(paths) > MAX_REQUESTS:
        raise InputError(f"{title}: {len(paths)} requests; at most {MAX_REQUESTS} can be explained")
    for name, values in (("seq_lens", seq_lens), ("query_lens", query_lens)):
        if len(values) != len(paths):
            raise InputError(f"{title}: {len(values)} {name} for {len(paths)} paths; one a request is expected")
    for request, (path, seq_len, query_len) in enumerate(zip(paths, seq_lens, query_lens, strict=True)):
        if not 1 <= seq_len <= MAX_POSITIONS:
            raise InputError(f"{title}: seq_lens[{request}] is {seq_len}; expected 1 to {MAX_POSITIONS}")
        if not 1 <= query_len <= seq_len:
            raise InputError(f"{title}: query_lens[{request}] is {query_len}; expected 1 to its seq_len, {seq_len}")
        if path and path[-1][2] > seq_len:
            raise InputError(
                f"{title}: the path of request {request} ends at {path[-1][2]}, beyond its seq_len {seq_len}"
            )
    return BatchDescription(title, paths, np.asarray(seq_lens, np.int64), np.asarray(query_lens, np.int64))


def parse_tree(text: str, query_len: int = 1) -> BatchDescription:
    """Batch of a uniform tree "NODES/TOKENS", for example "1,10/4096,416".

    NODES: nodes per level, TOKENS: tokens of each node of that level. Node j of a level hangs under node
    j * len(level above) // len(level). A node of the last level is one request, its tokens are the request's own.
    """
    node_text, slash, token_text = text.partition("/")
    if not slash:
        raise InputError(f"tree {text!r}: expected NODES/TOKENS, for example 1,10/4096,416")
    nodes, tokens = _positive_list(text, "nodes", node_text), _positive_list(text, "tokens", token_text)
    if len(nodes) != len(tokens):
        raise InputError(f"tree {text!r}: {len(nodes)} levels of nodes but {len(tokens)} of tokens")
    for above, level in itertools.pairwise(nodes):
        if level < above:
            raise InputError(f"tree {text!r}: a level of {level} nodes below {above}: some would have no request")
    if nodes[-1] > MAX_REQUESTS:
        raise InputError(f"tree {text!r}: {nodes[-1]} requests; at most {MAX_REQUESTS} can be explained")
    if query_len > tokens[-1]:
        raise InputError(f"tree {text!r}: {query_len} query tokens a request, but its own tokens are {tokens[-1]}")
    first_id = np.cumsum([0, *nodes]).tolist()
    ends = np.cumsum(tokens).tolist()
    paths: list[list[Segment]] = []
    for request in range(nodes[-1]):
        path: list[Segment] = []
        index = request
        for level in range(len(nodes) - 2, -1, -1):
            index = index * nodes[level] // nodes[level + 1]
            path.append((first_id[level] + index, ends[level] - tokens[level], ends[level]))
        paths.append(path[::-1])
    return describe(f"tree {text}", paths, [ends[-1]] * nodes[-1], [query_len] * nodes[-1])


def _positive_list(tree: str, what: str, text: str) -> list[int]:
    values = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= MAX_POSITIONS:
            raise InputError(f"tree {tree!r}: {what}: {word!r} is not a positive whole number")
        values.append(int(word))
    return values


_NodeId = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Position = Annotated[int, Field(ge=0, le=MAX_POSITIONS)]


class BatchModel(BaseModel):
    """JSON form of a batch: a batch file's content, and the `batch` of a running server's state."""

    model_config = ConfigDict(extra="forbid")

    paths: list[list[tuple[_NodeId, _Position, _Position]]]
    seq_lens: list[int]
    query_lens: list[int] | None = None
    mode: str | None = None


def read_batch_file(name: str) -> BatchDescription:
    """Batch of a JSON file {"paths": [[[id, start, end], ...], ...], "seq_lens": [...], "query_lens": [...]}."""
    try:
        content = json.loads(read_text(name))
    except OSError as error:
        raise InputError(f"{name}: cannot read the batch: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON: {error}") from error
    try:
        model = BatchModel.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{name}: {first_problem(error)}") from error
    return describe(name, model.paths, model.seq_lens, model.query_lens)


def first_problem(error: ValidationError) -> str:
    """The first problem of a pydantic error as `paths[3][0]: what is wrong`, with the number of further ones."""
    problem, *others = error.errors(include_url=False)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).removeprefix(".")
    value = "" if problem["type"] in ("missing", "extra_forbidden") else f" (got {_shortened(problem['input'])})"
    further = f"; and {len(others)} more" if others else ""
    return f"{where or 'content'}: {problem['msg']}{value}{further}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
