"""What every way to compute a case offers to the benchmark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from benchmarks.kernel.fixture import KV_DTYPES, Fixture


class Baseline(ABC):
    """A kernel with what its host code does before it.

    Attributes:
        name: of the row in the results.
        kv_dtypes: of KV, with queries in bf16.
        levels: "none" for request-wise attention, "shared" for what reads a shared prefix once.
        fixture: the case last bound.
    """

    name: str
    kv_dtypes: tuple[torch.dtype, ...] = tuple(KV_DTYPES.values())
    levels: str = "none"
    fixture: Fixture

    @abstractmethod
    def bind(self, fixture: Fixture) -> list[Any]:
        """Takes a case: tensors a server holds anyway are made here, untimed.

        Returns:
            Options to choose from by time (flattenings, metadata or none); empty: the case is not for this baseline.
        """

    def use(self, option: Any) -> None:  # noqa: B027 (nothing to do is the usual case)
        """Takes up one of the options that `bind` returned."""

    @abstractmethod
    def plan(self) -> None:
        """What is done once per step."""

    @abstractmethod
    def run(self) -> torch.Tensor:
        """The launches of one layer, fit for CUDA graphs; returns [requests, q_heads, head_dim]."""

    def facts(self) -> dict[str, Any]:
        """What the results should say besides times."""
        return {}

    def release(self) -> None:  # noqa: B027 (nothing to do is the usual case)
        """Gives back what only this case needs."""
