"""The prefix tree of a whole batch (BatchLLM, section 4.2), known before anything runs."""

from __future__ import annotations

import numpy as np

import sgl_prefix_attn._native as _native
from sgl_prefix_attn.offline.prompts import Int32Array, Int64Array, Prompts


class PrefixTree:
    """Compact and multi-level: a node is a range of token positions that at least two prompts have in common.

    Nodes stand in depth-first preorder, prompts in `order`, sorted by their tokens, so that a node's prompts are
    `order[node_first:node_last]`. Building takes one sort: 100,000 prompts of 2,000 tokens in seconds, without copying
    them.

    Raises:
        ValueError: offsets that do not fit the tokens.
    """

    __slots__ = ("_native", "prompts")

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self._native = _native.PrefixTree(prompts.tokens, prompts.offsets)

    def restricted(self, numbers: Int64Array) -> PrefixTree:
        """The tree of the prompts with these numbers alone; cheap, as nothing is sorted or compared again.

        Raises:
            IndexError: a number that is no prompt.
        """
        in_tree = np.zeros(len(self.prompts), dtype=np.bool_)
        in_tree[numbers] = True
        part = PrefixTree.__new__(PrefixTree)
        part.prompts = self.prompts
        part._native = self._native.restricted(in_tree)
        return part

    @property
    def num_nodes(self) -> int:
        return self._native.num_nodes

    @property
    def order(self) -> Int32Array:
        """[prompts in the tree] prompt numbers, sorted by tokens."""
        return self._native.order

    @property
    def shared(self) -> Int32Array:
        """[prompts in the tree] by place in `order`: tokens in common with the prompt before; 0 for the first."""
        return self._native.shared

    @property
    def node_parent(self) -> Int32Array:
        """[num_nodes] the node above, or -1."""
        return self._native.parent

    @property
    def node_begin(self) -> Int32Array:
        """[num_nodes] first token position."""
        return self._native.begin

    @property
    def node_end(self) -> Int32Array:
        """[num_nodes] one past the last token position."""
        return self._native.end

    @property
    def node_first(self) -> Int32Array:
        """[num_nodes] start of the node's prompts in `order`."""
        return self._native.first

    @property
    def node_last(self) -> Int32Array:
        """[num_nodes] end of the node's prompts in `order`."""
        return self._native.last

    @property
    def tail_node(self) -> Int32Array:
        """[prompts] by prompt number: its deepest node, or -1 (also when it is not in the tree)."""
        return self._native.tail_node

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts in the tree."""
        return int(self.prompts.lengths[self.order].sum())

    @property
    def unique_tokens(self) -> int:
        """Tokens to compute if every shared token is computed once."""
        return self.total_tokens - int(self.shared.sum(dtype=np.int64))

    @property
    def saving(self) -> float:
        """Share of the prompts' tokens that is saved when every shared token is computed once (equation 2)."""
        return int(self.shared.sum(dtype=np.int64)) / max(1, self.total_tokens)

    def enlarged_first_level(self) -> Int32Array:
        """[prompts] by prompt number: the node whose end is the prompt's single shared prefix, or -1 for none.

        BatchLLM's dynamic program (algorithm 1) that makes one level out of several with little loss of reuse. One
        case is better than in the paper: a node's last remaining child merges without penalty. Prompts with the same
        node form a group; every node has at least two prompts.
        """
        return self._native.enlarged_first_level()


def consecutive_sharing(prompts: Prompts, sequence: Int64Array) -> Int32Array:
    """[len(sequence)] tokens that each prompt of `sequence` has in common with the one before; 0 for the first.

    Raises:
        ValueError: a number in `sequence` that is no prompt.
    """
    return _native.common_prefix_lengths(prompts.tokens, prompts.offsets, np.asarray(sequence, dtype=np.int64))
