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


def unbounded(prompts: Sequence[Prompt]) -> float:
    """Share of blocks that a cache without a limit saves."""
    seen: set[int] = set()
    saved = total = 0
    for prompt in prompts:
        total += len(prompt.blocks)
        saved += sum(block in seen for block in prompt.blocks)
        seen.update(prompt.blocks)
    return saved / total
