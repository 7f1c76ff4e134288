"""Order of the prompts of a batch: groups together, those with much decoding first (BatchLLM, 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.offline.output_lengths import Float64Array
from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.prompts import Int64Array


@dataclass
class _Level:
    """A node whose prompts are being handed out: its remaining children, next one last."""

    children: Int64Array
    version: int


class GroupOrder(Iterator[int]):
    """Hands out the prompts of a batch, each once.

    Depth first through the prefix tree, so that whoever shares a prefix runs together, at every level. Among siblings
    the one with the greatest ratio of decode to prefill tokens comes first (equation 4 for a group; its output is
    estimated rather than taken as constant), so that long prefills come late and fill up the steps in which earlier
    requests decode. Prefill tokens count once for all that share them.

    Args:
        tree: of the prompts to run.
        decode_tokens: float64 [prompts] expected output of each; `update` takes better ones while the batch runs.

    Raises:
        ValueError: decode_tokens of another length.
    """

    def __init__(self, tree: PrefixTree, decode_tokens: Float64Array) -> None:
        self._order = tree.order.astype(np.int64)
        self._first, self._last = tree.node_first.astype(np.int64), tree.node_last.astype(np.int64)
        self._begin, self._shared = tree.node_begin.astype(np.int64), tree.shared.astype(np.int64)
        self._lengths = tree.prompts.lengths
        # Children of a node: nodes as they are numbered, prompts as num_nodes + place in `order`. The root is last.
        self._nodes = tree.num_nodes
        self._tail_end = np.append(tree.node_end, 0)[tree.tail_node].astype(np.int64)
        above = np.concatenate([tree.node_parent, tree.tail_node[self._order]]).astype(np.int64)
        above[above < 0] = self._nodes
        self._by_parent = np.argsort(above, kind="stable")
        self._child_bounds = np.searchsorted(above[self._by_parent], np.arange(self._nodes + 2))
        own = self._lengths[self._order] - self._shared
        self._prefill_sum = np.concatenate([[0], np.cumsum(own)])
        self._version = -1
        self.update(decode_tokens)
        self._stack = [self._level(self._nodes)]

    def update(self, decode_tokens: Float64Array) -> None:
        """Reorders the remaining prompts by new estimates, within the open groups and beyond."""
        if len(decode_tokens) != len(self._lengths):
            raise ValueError(f"decode_tokens has {len(decode_tokens)} entries for {len(self._lengths)} prompts")
        self._decode = np.asarray(decode_tokens, dtype=np.float64)
        self._decode_sum = np.concatenate([[0.0], np.cumsum(self._decode[self._order])])
        self._version += 1

    def __next__(self) -> int:
        while self._stack:
            level = self._stack[-1]
            if len(level.children) == 0:
                self._stack.pop()
                continue
            if level.version != self._version:
                level.children, level.version = self._sorted(level.children), self._version
            child = int(level.children[-1])
            level.children = level.children[:-1]
            if child >= self._nodes:
                return int(self._order[child - self._nodes])
            self._stack.append(self._level(child))
        raise StopIteration

    def ratios(self, children: Int64Array) -> Float64Array:
        """Decode tokens / prefill tokens of children (nodes, or num_nodes + place) below computed ancestors."""
        ratios = np.empty(len(children))
        is_node = children < self._nodes
        nodes = children[is_node]
        first, last = self._first[nodes], self._last[nodes]
        prefill = self._prefill_sum[last] - self._prefill_sum[first] + self._shared[first] - self._begin[nodes]
        ratios[is_node] = (self._decode_sum[last] - self._decode_sum[first]) / np.maximum(1, prefill)
        prompts = self._order[children[~is_node] - self._nodes]
        tails = self._lengths[prompts] - self._tail_end[prompts]
        ratios[~is_node] = self._decode[prompts] / np.maximum(1, tails)
        return ratios

    def _level(self, node: int) -> _Level:
        children = self._by_parent[self._child_bounds[node] : self._child_bounds[node + 1]]
        return _Level(self._sorted(children), self._version)

    def _sorted(self, children: Int64Array) -> Int64Array:
        # Ascending, as the next one is taken from the end; equal ratios by number, so that the order is the same
        # everywhere and whatever was handed out before.
        return children[np.lexsort((-children, self.ratios(children)))]
