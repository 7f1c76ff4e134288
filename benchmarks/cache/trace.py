"""Traces whose prompts are given as hashes of blocks (Mooncake's format)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Prompt:
    """A request's prompt: equal block numbers mean an equal prefix up to the end of the block.

    Attributes:
        blocks: block numbers; the last one may be partly filled.
        full: how many of them are full.
    """

    blocks: tuple[int, ...]
    full: int


def read(path: Path, limit: int | None = None) -> list[Prompt]:
    """Prompts in the trace's order. Raises ValueError with the line's number for lines that are no such requests."""
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(prompts) == limit:
                break
            try:
                record = json.loads(line)
                blocks, length = tuple(record["hash_ids"]), int(record["input_length"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: no request with hash_ids and input_length: {error}") from error
            prompts.append(Prompt(blocks, min(len(blocks), length // BLOCK_TOKENS)))
    return prompts


@dataclass(frozen=True)
class Turn:
    """A prompt's place in its session."""

    session: int
    last: bool


def turns_of(prompts: Sequence[Prompt]) -> list[Turn]:
    """Sessions, as the prompts show them: a turn continues the latest prompt that is a beginning of it.

    A prompt is a beginning if all its full blocks are, two at least: the first one may be a common system prompt.
    """
    open_ends: dict[tuple[int, ...], int] = {}  # full blocks of a prompt that nobody continued -> its number
    session, last = [0] * len(prompts), [True] * len(prompts)
    for number, prompt in enumerate(prompts):
        session[number] = number
        for length in range(prompt.full, 1, -1):
            before = open_ends.pop(prompt.blocks[:length], None)
            if before is not None:
                session[number], last[before] = session[before], False
                break
        if prompt.full > 1:
            open_ends[prompt.blocks[: prompt.full]] = number
    return [Turn(*turn) for turn in zip(session, last, strict=True)]


def working_set(prompts: Sequence[Prompt], turns: Sequence[Turn]) -> float:
    """Blocks of the sessions that are between their first and their last turn; the mean over all requests."""
    users: dict[int, set[int]] = {}  # sessions by block
    blocks: dict[int, set[int]] = {}
    total = 0
    for prompt, turn in zip(prompts, turns, strict=True):
        for block in prompt.blocks:
            users.setdefault(block, set()).add(turn.session)
            blocks.setdefault(turn.session, set()).add(block)
        total += len(users)
        if turn.last:
            for block in blocks.pop(turn.session):
                users[block].discard(turn.session)
                if not users[block]:
                    del users[block]
    return total / len(prompts)


def unbounded(prompts: Sequence[Prompt]) -> float:
    """Share of blocks that a cache without a limit saves."""
    seen: set[int] = set()
    saved = total = 0
    for prompt in prompts:
        total += len(prompt.blocks)
        saved += sum(block in seen for block in prompt.blocks)
        seen.update(prompt.blocks)
    return saved / total
