"""The messages between the batch command and the processes of its engines (see `engines.py` for their order)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.offline.answers import Answer


@dataclass(frozen=True)
class Line:
    """A request to check and to plan. `number` comes back with what is said of it; `text` is a line of the file."""

    number: int
    url: str
    text: bytes


@dataclass(frozen=True)
class Unusable:
    """The engine's arguments cannot be used; says why."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """A line that cannot run, with the code and the message for the errors file."""

    number: int
    code: str
    message: str


@dataclass(frozen=True)
class Checked:
    """What was found before anything loads.

    Attributes:
        refused: lines that cannot run.
        ignored: fields of bodies that SGLang does not know, and in how many lines.
    """

    refused: Sequence[Refused]
    ignored: Mapping[str, int]


def together(parts: Sequence[Checked]) -> Checked:
    """What several engines have found, each in lines of its own."""
    ignored = Counter[str]()
    for part in parts:
        ignored.update(part.ignored)
    return Checked([refused for part in parts for refused in part.refused], dict(ignored))


@dataclass(frozen=True)
class Planned:
    """What a line means.

    Attributes:
        tokens: [prompt] int32; None: not one prompt, or not known yet. The request runs without a place in the job.
        limit: most tokens of a sample; None: as many as fit.
        minimum: least tokens of a sample; may be above the limit.
        samples: sequences that the engine generates.
        apart: prompts share something only with those that have the same text here.
    """

    number: int
    tokens: Any
    limit: int | None
    minimum: int
    samples: int
    apart: str = ""


@dataclass(frozen=True)
class Go:
    """The model is to load.

    Attributes:
        batching: a choice of token_batching.py.
        shared: share of the prompts' text that an earlier prompt begins with.
    """

    batching: str = "off"
    shared: float = 0.0


@dataclass(frozen=True)
class Ready:
    """An engine takes requests.

    Attributes:
        room: most tokens that a prompt and its output can have together.
        strict: whether the engine would never start a request that may need more. Else it cuts the output.
        pool: tokens of its KV pool.
        chunk: most tokens of a step with a prefill.
        unmixed: why such a step has no decodes; "" if it has.
    """

    room: int
    strict: bool = False
    pool: int = 0
    chunk: int = 0
    unmixed: str = ""


@dataclass(frozen=True)
class Steps:
    """Steps of the model that an engine has counted, their tokens, and how many had nearly a chunk of tokens."""

    count: int = 0
    tokens: int = 0
    full: int = 0


@dataclass(frozen=True)
class Task:
    """One request to run.

    Attributes:
        number: comes back with its outcome.
        limit: replaces the limit of a request that has none.
        place: where it stands in the job, encoded; None: nowhere.
    """

    number: int
    url: str
    text: bytes
    limit: int | None = None
    place: list[str | int] | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a task: an answer, or the engine's reason for a refusal."""

    number: int
    answer: Answer | None
    error: str = ""
