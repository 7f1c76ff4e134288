"""Sharing that is lost because requests with equal prefixes run on different engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict


class Prompt(BaseModel):
    """A running request's prompt: its length, and a hash of each block with all blocks before it."""

    model_config = ConfigDict(extra="ignore")

    tokens: int
    hashes: list[str]


class RunningPrompts(BaseModel):
    """Prompts of the requests that one engine runs. block: tokens of each block but a prompt's last one."""

    model_config = ConfigDict(extra="ignore")

    block: int
    prompts: list[Prompt]


class Spread(NamedTuple):
    """Prompt tokens of the requests that run on several engines.

    Attributes:
        engines: requests of each engine.
        per_request: tokens, counted for each request.
        kept: different tokens of each engine, summed: what packed steps read at least.
        together: different tokens over all engines: what one engine with all requests would read.
        groups: prompts of at least two requests.
        split: of these, prompts that run on more than one engine.
    """

    engines: dict[str, int]
    per_request: int
    kept: int
    together: int
    groups: int
    split: int

    @property
    def lost(self) -> float:
        """The share of the possible saving that the spread costs; 0 where nothing could be saved."""
        possible = self.per_request - self.together
        return (self.kept - self.together) / possible if possible else 0.0


def spread(engines: Mapping[str, RunningPrompts]) -> Spread:
    """How the running requests' shared prefixes lie on engines.

    Args:
        engines: by name, what each engine runs; data-parallel ranks are engines of their own.
    """
    unions: list[dict[str, int]] = [_tokens(running, running.prompts) for running in engines.values()]
    everywhere: dict[str, int] = {}
    for union in unions:
        everywhere |= union
    places: dict[str, list[str]] = defaultdict(list)
    for name, running in engines.items():
        for prompt in running.prompts:
            if prompt.hashes:
                places[prompt.hashes[-1]].append(name)
    groups = [names for names in places.values() if len(names) > 1]
    return Spread(
        {name: len(running.prompts) for name, running in engines.items()},
        sum(prompt.tokens for running in engines.values() for prompt in running.prompts),
        sum(sum(union.values()) for union in unions),
        sum(everywhere.values()),
        len(groups),
        sum(len(set(names)) > 1 for names in groups),
    )


def _tokens(running: RunningPrompts, prompts: Sequence[Prompt]) -> dict[str, int]:
    """Tokens of each different block."""
    return {
        name: min(running.block, prompt.tokens - index * running.block)
        for prompt in prompts
        for index, name in enumerate(prompt.hashes)
    }


def as_json(found: Spread) -> dict[str, Any]:
    """A spread as JSON-able values."""
    return {**found._asdict(), "lost": round(found.lost, 4)}


def render(found: Spread) -> str:
    """A spread for a terminal."""
    requests = sum(found.engines.values())
    if not requests:
        return "no request runs on any of the engines; ask while they work"
    lines = [f"{requests:,} running requests on {len(found.engines)} engines"]
    lines += [f"  {name}: {count:,}" for name, count in found.engines.items()]
    lines += [
        f"prompts of several requests: {found.groups:,}, of which {found.split:,} run on more than one engine",
        "prompt tokens that a packed step reads at least",
        f"  one by one    {found.per_request:>14,}",
        f"  as spread     {found.kept:>14,}",
        f"  kept together {found.together:>14,}",
        f"{found.lost:.0%} of the possible saving is lost to the spread",
    ]
    if found.split:
        lines.append("route the samples of a prompt to one engine: examples/README.md")
    return "\n".join(lines)
