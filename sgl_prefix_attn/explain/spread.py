"""Sharing that is lost because requests with equal prefixes run on different engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

_HASH_CHARACTERS = 16


class RunningPrompts(BaseModel):
    """Prompts of the requests that one engine runs.

    Attributes:
        block: tokens of a block.
        key: the same on servers whose hashes can be compared.
        pending: prompts that are not hashed yet to their end.
        prompts: of each request the hashes of its prompt's full blocks, each with all blocks before it, as one text.
    """

    model_config = ConfigDict(extra="ignore")

    block: Annotated[int, Field(ge=1)]
    key: str
    pending: int
    prompts: list[str]

    def hashes(self) -> list[list[str]]:
        """The hashes of each prompt."""
        return [
            [text[at : at + _HASH_CHARACTERS] for at in range(0, len(text), _HASH_CHARACTERS)] for text in self.prompts
        ]


class Spread(NamedTuple):
    """Tokens in full blocks of the prompts that run on several engines.

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
    blocks = {name: running.block for name, running in engines.items()}
    hashes = {name: running.hashes() for name, running in engines.items()}
    unions = {name: {block for prompt in prompts for block in prompt} for name, prompts in hashes.items()}
    everywhere = {block: blocks[name] for name, union in unions.items() for block in union}
    places: dict[str, list[str]] = defaultdict(list)
    for name, prompts in hashes.items():
        for prompt in prompts:
            if prompt:
                places[prompt[-1]].append(name)
    groups = [names for names in places.values() if len(names) > 1]
    return Spread(
        {name: len(prompts) for name, prompts in hashes.items()},
        sum(blocks[name] * len(prompt) for name, prompts in hashes.items() for prompt in prompts),
        sum(blocks[name] * len(union) for name, union in unions.items()),
        sum(everywhere.values()),
        len(groups),
        sum(len(set(names)) > 1 for names in groups),
    )


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
