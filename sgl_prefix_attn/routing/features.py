"""Features of a decode or verify step from its forest and lengths, before it is planned.

Tokens count per layer and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest


@dataclass(frozen=True)
class ForestFacts:
    """Features that depend on the forest only.

    Attributes:
        requests: number of requests.
        nodes: number of shared ranges.
        links: pairs of a shared range and a request below it; each is one partial result.
        shared_tokens: tokens of the shared ranges, each counted once.
        linked_tokens: tokens of the shared ranges, each counted once per request below.
        longest_shared: tokens of the longest shared range.
        tail_begin: int64 [requests], first position of each request's own tokens.
    """

    requests: int
    nodes: int
    links: int
    shared_tokens: int
    linked_tokens: int
    longest_shared: int
    tail_begin: Int64Array

    @classmethod
    def of(cls, forest: PrefixForest) -> ForestFacts:
        tail_begin = forest.tail_begin.astype(np.int64)
        nodes = forest.num_nodes
        if not nodes:
            return cls(forest.num_requests, 0, 0, 0, 0, 0, tail_begin)
        tokens = (forest.node_end - forest.node_begin).astype(np.int64)
        links = forest.node_last - forest.node_first
        return cls(
            forest.num_requests,
            nodes,
            int(links.sum()),
            int(tokens.sum()),
            int(tokens @ links),
            int(tokens.max()),
            tail_begin,
        )


@dataclass(frozen=True)
class StepFeatures:
    """The features of a decode or verify step that its cost depends on.

    Attributes:
        requests: number of requests.
        tokens: KV tokens of all requests, shared ones counted once per request.
        unique_tokens: distinct KV tokens.
        linked_tokens: tokens in shared ranges, counted once per request.
        nodes, links: see `ForestFacts`.
        longest_range: tokens of the longest shared range or tail.
        longest_request: tokens of the longest request.
        rows: query rows of each request: 1, or the drafts of a verify step.
    """

    requests: int
    tokens: int
    unique_tokens: int
    linked_tokens: int
    nodes: int
    links: int
    longest_range: int
    longest_request: int
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
        return cls(
            requests=facts.requests,
            tokens=tokens,
            unique_tokens=tokens - facts.linked_tokens + facts.shared_tokens,
            linked_tokens=facts.linked_tokens,
            nodes=facts.nodes,
            links=facts.links,
            longest_range=max(facts.longest_shared, int((seq_lens - facts.tail_begin).max(initial=0))),
            longest_request=int(seq_lens.max(initial=0)),
            rows=rows,
        )
