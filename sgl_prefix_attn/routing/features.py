"""Features of a decode or verify step from its forest and lengths, before it is planned.

Tokens count per layer and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import ModelShape

MIB = 1 << 20


@dataclass(frozen=True)
class ForestFacts:
    """Features that depend on the forest only.

    Attributes:
        requests: number of requests.
        links: pairs of a shared range and a request below it; each is one partial result.
        saved_tokens: tokens of the shared ranges, for each request below but the first.
    """

    requests: int
    links: int
    saved_tokens: int

    @classmethod
    def of(cls, forest: PrefixForest) -> ForestFacts:
        tokens = (forest.node_end - forest.node_begin).astype(np.int64)
        links = (forest.node_last - forest.node_first).astype(np.int64)
        return cls(forest.num_requests, int(links.sum()), int(tokens @ (links - 1)))


@dataclass(frozen=True)
class StepFeatures:
    """The features of a decode or verify step that its route depends on.

    Attributes:
        requests: number of requests.
        tokens: KV tokens of all requests, shared ones counted once per request.
        unique_tokens: distinct KV tokens.
        links: see `ForestFacts`.
        rows: query rows of each request: 1, or the drafts of a verify step.
    """

    requests: int
    tokens: int
    unique_tokens: int
    links: int
    rows: int = 1

    @classmethod
    def of(cls, facts: ForestFacts, seq_lens: Int64Array, rows: int = 1) -> StepFeatures:
        """Features of a step whose forest has these facts.

        Args:
            seq_lens: int64 [requests] KV lengths, including the tokens of this step.
            rows: query rows of each request.

        Raises:
            ValueError: the number of lengths is not the number of requests in the forest.
        """
        if len(seq_lens) != facts.requests:
            raise ValueError(f"seq_lens has {len(seq_lens)} entries for a forest of {facts.requests} requests")
        tokens = int(seq_lens.sum())
        return cls(facts.requests, tokens, tokens - facts.saved_tokens, facts.links, rows)

    @property
    def saved_tokens(self) -> int:
        """KV tokens that requests read one by one, and a packed step does not."""
        return self.tokens - self.unique_tokens


def token_bytes(shape: ModelShape) -> int:
    """KV bytes of a token in one layer on one rank."""
    return 2 * shape.kv_heads * shape.head_dim * shape.kv_bytes
