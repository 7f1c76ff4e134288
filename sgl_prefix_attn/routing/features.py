"""What is known of a decode step from its forest and lengths alone, before anything is planned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest


@dataclass(frozen=True)
class ForestFacts:
    """The part that stays while the batch's forest does: tokens are KV positions, per layer and KV head.

    Attributes:
        nodes: shared ranges.
        links: requests below each shared range, summed: what a request's partial results are merged from.
        shared_tokens: tokens of the shared ranges, each counted once.
        linked_tokens: the same, each counted once for every request below.
        longest_shared: tokens of the longest shared range.
        tail_begin: [requests] where each request's own tokens start, in the dtype of lengths.
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
    """A decode step, as far as its cost depends on it: tokens are KV positions, per layer and KV head.

    Attributes:
        tokens: of all requests; shared ones as often as they are used.
        unique_tokens: each position once.
        linked_tokens: tokens that lie in shared ranges, as often as they are used.
        longest_range: the longest shared range or own tail: the longest that one unit of packed work can be.
        longest_request: tokens of the longest request.
        nodes, links: see `ForestFacts`.
    """

    requests: int
    tokens: int
    unique_tokens: int
    linked_tokens: int
    nodes: int
    links: int
    longest_range: int
    longest_request: int

    @classmethod
    def of(cls, facts: ForestFacts, seq_lens: Int64Array) -> StepFeatures:
        """Of a step whose forest has these facts.

        Args:
            seq_lens: [requests] int64 KV lengths by batch index, the step's own tokens included.

        Raises:
            ValueError: lengths of another batch size than the forest's.
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
            longest_range=max(facts.longest_shared, int((seq_lens - facts.tail_begin).max())),
            longest_request=int(seq_lens.max()),
        )
