"""The tree of a batch is the compact trie of its prompts, and its single-level form loses little reuse."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.offline.prefix_tree import PrefixTree, consecutive_sharing
from sgl_prefix_attn.offline.prompts import Prompts

# Few different tokens and short prompts: prefixes, duplicates and empty prompts are common.
BATCHES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=24)


def tree_of(prompts: list[list[int]]) -> PrefixTree:
    return PrefixTree(Prompts.from_lists(prompts))


def trie_nodes(prompts: list[list[int]]) -> dict[tuple[int, ...], frozenset[int]]:
    """Compact trie by brute force: shared prefix that ends at a branch or with a prompt -> the prompts below."""
    below = defaultdict(set)
    for number, prompt in enumerate(prompts):
        for end in range(1, len(prompt) + 1):
            below[tuple(prompt[:end])].add(number)
    nodes = {}
    for prefix, members in below.items():
        next_tokens = {prompts[m][len(prefix)] if len(prompts[m]) > len(prefix) else None for m in members}
        if len(members) >= 2 and (len(next_tokens) >= 2 or None in next_tokens):
            nodes[prefix] = frozenset(members)
    return nodes


@settings(max_examples=300, deadline=None)
@given(BATCHES)
def test_nodes_are_those_of_a_brute_force_trie(prompts):
    tree = tree_of(prompts)
    found = {}
    for node in range(tree.num_nodes):
        members = tree.order[tree.node_first[node] : tree.node_last[node]].tolist()
        found[tuple(prompts[members[0]][: tree.node_end[node]])] = frozenset(members)
    assert found == trie_nodes(prompts)
    edges = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert tree.unique_tokens == len(edges)
    assert [prompts[r] for r in tree.order] == sorted(prompts)


# BatchLLM, section 4.2: six prompts; the root's right child is one token 'b' that prompts 2 to 6 share, so that the
# plain first level saves 4 tokens; prompts 4 and 5 share 8 tokens, which saves 8. A node of level 3 is merged
# with its right child first, the result with 'b' then (figures 4b and 4c).
PAPER_EXAMPLE = [[1, 1, 1], [2, 10], [2, 3, 3, 20], [2, 3, 3, 4, 4, 4, 4, 4, 30], [2, 3, 3, 4, 4, 4, 4, 4, 40], [2, 50]]


def reuse(tree: PrefixTree, nodes: np.ndarray) -> int:
    """Tokens saved when each node's prompts share its prefix and nothing else is shared."""
    used, members = np.unique(nodes[nodes >= 0], return_counts=True)
    return int(((members - 1) * tree.node_end[used]).sum())


def plain_first_level(tree: PrefixTree) -> np.ndarray:
    top = []
    for node in tree.tail_node.tolist():
        while node >= 0 and tree.node_parent[node] >= 0:
            node = int(tree.node_parent[node])
        top.append(node)
    return np.array(top, dtype=np.int32)


def test_paper_example_of_the_enlarged_first_level():
    tree = tree_of(PAPER_EXAMPLE)
    assert reuse(tree, plain_first_level(tree)) == 4
    nodes = tree.enlarged_first_level()
    assert nodes[3] == nodes[4]
    assert tree.node_end[nodes[3]] == 8
    assert nodes[1] == nodes[2] == nodes[5]
    assert tree.node_end[nodes[1]] == 1  # 'b' stays for the others
    assert nodes[0] == -1
    assert reuse(tree, nodes) == 8 + 2


@settings(max_examples=300, deadline=None)
@given(BATCHES)
def test_enlarged_first_level_is_between_the_plain_one_and_all_levels(prompts):
    tree = tree_of(prompts)
    nodes = tree.enlarged_first_level()
    saved = reuse(tree, nodes)
    assert reuse(tree, plain_first_level(tree)) <= saved <= int(tree.shared.sum())
    for number, node in enumerate(nodes.tolist()):
        if node >= 0:
            members = tree.order[tree.node_first[node] : tree.node_last[node]]
            assert number in members
            assert (nodes == node).sum() >= 2


@settings(max_examples=100, deadline=None)
@given(BATCHES, st.randoms(use_true_random=False))
def test_sharing_of_neighbours_in_any_sequence(prompts, random):
    sequence = list(range(len(prompts)))
    random.shuffle(sequence)
    found = consecutive_sharing(Prompts.from_lists(prompts), np.array(sequence, dtype=np.int64))
    expected = [0] * len(sequence)
    for place in range(1, len(sequence)):
        a, b = prompts[sequence[place - 1]], prompts[sequence[place]]
        while expected[place] < min(len(a), len(b)) and a[expected[place]] == b[expected[place]]:
            expected[place] += 1
    assert found.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(BATCHES, st.data())
def test_a_part_of_the_tree_is_the_tree_of_that_part(prompts, data):
    kept = [number for number in range(len(prompts)) if data.draw(st.booleans(), label=f"prompt {number}")]
    part = tree_of(prompts).restricted(np.array(kept, dtype=np.int64))
    alone = tree_of([prompts[number] for number in kept])
    assert part.order.tolist() == [kept[place] for place in alone.order]
    for name in ("shared", "node_parent", "node_begin", "node_end", "node_first", "node_last"):
        assert getattr(part, name).tolist() == getattr(alone, name).tolist(), name
    assert part.tail_node[kept].tolist() == alone.tail_node.tolist()
    assert part.saving == alone.saving


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], r"offsets\[0\] is 1"),
        ([0, 3, 2, 4], "prompt 1 lies in .3, 2.; expected 0 to 2.31 - 1 tokens"),
        ([0, -(2**63), 2**63 - 1, 4], "prompt 0 lies in .0, -9223372036854775808."),
        ([0, 3], "offsets end at 3, but there are 4 tokens"),
        ([], "one entry more"),
    ],
)
def test_offsets_that_do_not_fit_the_tokens(offsets, message):
    with pytest.raises(ValueError, match=message):
        PrefixTree(Prompts(np.zeros(4, dtype=np.int32), np.array(offsets, dtype=np.int64)))


def test_arrays_of_other_types_and_other_prompts_are_refused():
    with pytest.raises(TypeError, match="tokens must be a contiguous array of int32, not of int64"):
        Prompts(np.zeros(4, dtype=np.int64), np.array([0, 4], dtype=np.int64))
    with pytest.raises(ValueError, match=r"sequence\[1\] is 2; expected a prompt from 0 to 1"):
        consecutive_sharing(Prompts.from_lists([[1], [2]]), np.array([0, 2], dtype=np.int64))
    with pytest.raises(OverflowError):
        Prompts.from_lists([[1], [2**31]])
