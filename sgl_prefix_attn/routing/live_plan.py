"""Plans of live A/B tests. Bounded, seeded, the same on all ranks."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sgl_prefix_attn.routing.policy_names import PolicyName, parse

MOST_STEPS = 100_000
ROWS_OF_AN_ANSWER = 8192

Whole = Annotated[int, Field(strict=True)]


class LivePlan(BaseModel):
    """Two arms in blocks of decode steps. Blocks come in pairs, one of each arm, in a drawn order.

    Attributes:
        arms: names of two policies; the same name twice is an A/A test.
        block_steps: decode steps of a block.
        warmup_steps: first steps of a block that do not count.
        pairs: number of pairs of blocks.
        lease_steps: steps of any kind after which the test ends unless its client has asked for it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    arms: tuple[str, str]
    block_steps: Annotated[Whole, Field(ge=4, le=4096)] = 16
    warmup_steps: Annotated[Whole, Field(ge=1, le=2048)] = 4
    pairs: Annotated[Whole, Field(ge=2, le=10_000)] = 400
    seed: Annotated[Whole, Field(ge=0, lt=1 << 31)] = 0
    lease_steps: Annotated[Whole, Field(ge=16, le=20_000)] = 2000

    @model_validator(mode="after")
    def _bounded(self) -> LivePlan:
        for arm in self.arms:
            parse(arm)
        if self.warmup_steps >= self.block_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps}: fewer than block_steps {self.block_steps} are needed")
        if self.steps > MOST_STEPS:
            raise ValueError(f"{self.steps} decode steps (2 x pairs x block_steps): at most {MOST_STEPS} are accepted")
        return self

    @property
    def steps(self) -> int:
        """Decode steps of the whole test."""
        return 2 * self.pairs * self.block_steps

    def names(self) -> tuple[PolicyName, PolicyName]:
        """The arms' policies."""
        return parse(self.arms[0]), parse(self.arms[1])

    def order(self) -> npt.NDArray[np.int8]:
        """int8 [2 * pairs], the arm of each block: 0 or 1."""
        first = np.random.default_rng(self.seed).integers(2, size=self.pairs)
        return np.stack([first, 1 - first], axis=1).reshape(-1).astype(np.int8)
