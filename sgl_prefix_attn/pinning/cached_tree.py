"""The cached prefixes as a tree of nodes, and the selection of nodes to evict."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sgl_prefix_attn.pinning.leaf_order import Entry, LeafOrder, Rank, combined
from sgl_prefix_attn.pinning.retention_score import FINISHED, KNOWN_USES, RETAINED, UNKNOWN, Placement, RetentionScores

ROOT = -1


class NodeSpan(NamedTuple):
    """A node of a prefix cache: positions [begin, end) of the prompts that run through it.

    `leaf` is true if the cache has no nodes below it.
    """

    handle: Any
    id: int
    begin: int
    end: int
    leaf: bool = False


class Use(NamedTuple):
    """Whose request used a path, and how much of it that found in the cache. None: unknown.

    Others may have used what it found.
    """

    owner: Hashable = None
    found: int | None = None


UNKNOWN_USE = Use()


@dataclass(slots=True)
class CachedNode:
    """A node of the tree.

    Attributes:
        parent: id of the node above, ROOT if there is none.
        begin, end: token positions.
        keys: prefix keys of a prompt that runs through the node.
        prompt: the caller's record of that prompt.
        last_use: number of the last use, counted over the whole cache.
        handle: the cache's reference to the node.
        key: prefix key of the block in which the node begins, None for a remainder shorter than a block.
        edge: identifies the first page of tokens, see `CachedTree`.
        finished: whether the last announced use of `key` is over.
        owner: the only one whose requests have used the node; None if several have, or others may have.
        superseded: whether its owner needs it no more.
        children: ids of the nodes below.
    """

    id: int
    parent: int
    begin: int
    end: int
    keys: Sequence[int]
    prompt: Any
    last_use: int
    handle: Any
    key: int | None = None
    edge: Hashable = None
    finished: bool = False
    owner: Hashable = None
    superseded: bool = False
    children: dict[int, None] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.end - self.begin


class CachedTree:
    """Nodes by id. Ids are never reused; a split puts a new node above the lower part, which keeps its id.

    The leaves are kept in the order of their retention scores and in the order of their last use.

    Args:
        block: tokens per prefix key.
        scores: retention scores; the tree follows their changes.
        edge_of: gives for a prompt and a position a value that is equal for prompts whose next page of tokens is
            equal. With it, only the children with equal edges are looked at after a split. None: all children are.
    """

    def __init__(
        self, block: int, scores: RetentionScores, edge_of: Callable[[Any, int], Hashable] | None = None
    ) -> None:
        self._block = block
        self._scores = scores
        self._edge_of = edge_of
        self._nodes: dict[int, CachedNode] = {}
        self._leaves: dict[int, None] = {}
        self._by_edge: dict[tuple[int, Hashable], dict[int, None]] = {}  # children by parent and edge
        self._by_key: dict[int, dict[int, None]] = {}
        self._by_score = LeafOrder()
        self._by_use = LeafOrder()
        self._in_use: dict[int, None] = {}  # leaves left out of both orders, see `select_victims`
        self._uses = 0
        self._tokens = 0
        scores.on_change = self._key_changed

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes

    @property
    def tokens(self) -> int:
        """Tokens of all nodes."""
        return self._tokens

    def used(
        self, path: Iterable[NodeSpan], keys: Sequence[int], prompt: Any = None, use: Use = UNKNOWN_USE
    ) -> list[int]:
        """A request used this path from the root down.

        Args:
            keys: the request's prefix keys.
            prompt: kept with the nodes.

        Returns:
            Nodes that a split may have moved below a new node of the path: read their paths and `place` them.
        """
        self._uses += 1
        return self._put(path, keys, prompt, self._uses, use)

    def seen(self, path: Iterable[NodeSpan], keys: Sequence[int], prompt: Any = None) -> list[int]:
        """A request found this path, but did not use it; arguments as in `used`."""
        return self._put(path, keys, prompt, 0)

    def place(self, path: Sequence[NodeSpan]) -> list[int]:
        """Moves the last node of a path to where it is now. Returns what `used` returns."""
        last = self._nodes.get(path[-1].id)
        return [] if last is None else self._put(path, last.keys, last.prompt, last.last_use)

    def supersede(self, node_id: int, owner: Hashable, begin: int) -> int:
        """A node and those above it from this position on go first, where only this owner has used them.

        They do so until they are used again. Returns their tokens.
        """
        tokens, node = 0, self._nodes.get(node_id)
        while node is not None and node.begin >= begin:
            if node.owner == owner and not node.superseded:
                node.superseded = True
                tokens += node.tokens
                self._arrange(node)
            node = self._nodes.get(node.parent)
        return tokens

    def parent_of(self, node_id: int) -> int:
        """The parent that is known; ROOT if there is none or the node is unknown."""
        node = self._nodes.get(node_id)
        return ROOT if node is None else node.parent

    def leaves(self) -> list[CachedNode]:
        """Nodes without known children, in no particular order."""
        return [self._nodes[node_id] for node_id in self._leaves]

    def next_leaves(self, count: int) -> list[CachedNode]:
        """The next `count` leaves of an endless round over all leaves."""
        ids = [node_id for node_id, _ in zip(self._leaves, range(count), strict=False)]
        for node_id in ids:
            del self._leaves[node_id]
            self._leaves[node_id] = None
        return [self._nodes[node_id] for node_id in ids]

    def get(self, node_id: int) -> CachedNode | None:
        return self._nodes.get(node_id)

    def drop(self, node_id: int) -> None:
        """The leaf is no longer cached."""
        node = self._nodes.pop(node_id)
        self._tokens -= node.tokens
        self._leaves.pop(node_id, None)
        self._in_use.pop(node_id, None)
        self._by_score.discard(node_id)
        self._by_use.discard(node_id)
        self._index_key(node, None)
        self._detach(node)

    def clear(self) -> None:
        for index in (self._nodes, self._leaves, self._by_edge, self._by_key, self._in_use):
            index.clear()
        self._tokens = 0
        self._by_score.clear()
        self._by_use.clear()

    def select_victims(
        self,
        tokens: int,
        in_use: Callable[[CachedNode], bool] | None = None,
        *,
        by_use: bool = False,
        below: float = math.inf,
    ) -> list[CachedNode]:
        """The nodes to evict for `tokens` tokens, in order: the lowest score first, then the least recently used.

        Only leaves can go; a node becomes one when all nodes below it are selected. Reads the selected leaves and
        those in use, not the others. Leaves in use are left out of later selections until `recheck` or their next use.

        Args:
            in_use: nodes that cannot be evicted now.
            by_use: select the least recently used nodes instead.
            below: nodes of this score or a higher one are not selected.
        """
        order = self._by_use if by_use else self._by_score
        became_leaves: list[Rank] = []
        selected_children: dict[int, int] = {}
        chosen: list[CachedNode] = []
        skipped: list[CachedNode] = []
        for rank in combined(order.ascending(self._scores), became_leaves):
            if tokens <= 0 or rank.score >= below:
                break
            node = self._nodes[rank.node_id]
            if in_use is not None and in_use(node):
                skipped.append(node)
                continue
            chosen.append(node)
            tokens -= node.tokens
            parent = self._nodes.get(node.parent)
            if parent is None:
                continue
            selected_children[parent.id] = selected_children.get(parent.id, 0) + 1
            if selected_children[parent.id] == len(parent.children):
                score = 0.0 if by_use else self._scores.score(*self._placement(parent))
                heapq.heappush(became_leaves, Rank(score, parent.last_use, -parent.begin, parent.id))
        for node in skipped:
            self.set_in_use(node)
        return chosen

    def set_in_use(self, node: CachedNode) -> None:
        """Leaves a leaf out of selections until `recheck` or its next use."""
        if node.id in self._leaves:
            self._in_use[node.id] = None
            self._arrange(node)

    def recheck(self, count: int, in_use: Callable[[CachedNode], bool]) -> None:
        """Asks for `count` of the leaves that were in use whether they still are, in an endless round."""
        for node_id in [node_id for node_id, _ in zip(self._in_use, range(count), strict=False)]:
            node = self._nodes[node_id]
            del self._in_use[node_id]
            if in_use(node):
                self._in_use[node_id] = None
            else:
                self._arrange(node)

    # Details ----------------------------------------------------------------------------------------------------------

    def _put(
        self, path: Iterable[NodeSpan], keys: Sequence[int], prompt: Any, last_use: int, use: Use | None = None
    ) -> list[int]:
        parent = ROOT
        moved: list[int] = []
        for handle, node_id, begin, end, leaf in path:
            node = self._nodes.get(node_id)
            if node is None:
                node = CachedNode(node_id, ROOT, begin, end, keys, prompt, last_use, handle)
                self._nodes[node_id] = node
                self._leaves[node_id] = None
                self._tokens += node.tokens
                edge = self._edge(node)
                below = []
                if not leaf:
                    siblings = self._by_edge.get((parent, edge), ())
                    below = [other for other in siblings if self._nodes[other].end > end]
                    moved += below
                if below:  # a split: the lower part tells who has used the upper one
                    lower = self._nodes[below[0]]
                    node.last_use = max(last_use, lower.last_use)
                    node.owner = lower.owner if use is None or use.owner == lower.owner else None
                    node.superseded = lower.superseded and use is None
                elif use is not None and use.found is not None and begin >= use.found:
                    node.owner = use.owner
                self._attach(node, parent, edge)
            else:
                changed = node.parent != parent or node.begin != begin
                self._tokens += end - begin - node.tokens
                node.begin, node.end, node.handle = begin, end, handle
                if last_use > node.last_use:
                    node.last_use = last_use
                    if use is not None:
                        node.owner, node.superseded = node.owner if node.owner == use.owner else None, False
                    self._in_use.pop(node_id, None)
                    if len(keys) * self._block > begin:
                        node.keys, node.prompt = keys, prompt
                if changed:
                    self._detach(node)
                    self._attach(node, parent, self._edge(node))
            self._rekey(node)
            self._arrange(node)
            parent = node_id
        return moved

    def _edge(self, node: CachedNode) -> Hashable:
        return None if self._edge_of is None else self._edge_of(node.prompt, node.begin)

    def _rekey(self, node: CachedNode) -> None:
        index = node.begin // self._block
        key = node.keys[index] if index < len(node.keys) else None
        if key != node.key:
            self._index_key(node, key)
        self._update_finished(node)

    def _index_key(self, node: CachedNode, key: int | None) -> None:
        if node.key is not None:
            others = self._by_key[node.key]
            del others[node.id]
            if not others:
                del self._by_key[node.key]
        node.key = key
        if key is not None:
            self._by_key.setdefault(key, {})[node.id] = None

    def _key_changed(self, key: int) -> None:
        for node_id in self._by_key.get(key, ()):
            node = self._nodes[node_id]
            self._update_finished(node)
            self._arrange(node)

    def _update_finished(self, node: CachedNode) -> None:
        finished = self._scores.is_finished(node.key)
        if finished != node.finished:
            node.finished = finished
            for leaf in self._leaves_below(node):
                self._arrange(leaf)

    def _leaves_below(self, node: CachedNode) -> Iterator[CachedNode]:
        stack = list(node.children)
        while stack:
            below = self._nodes[stack.pop()]
            stack += below.children
            if not below.children:
                yield below

    def _placement(self, node: CachedNode) -> Placement:
        """The scores' place, but none above a finished node on the path, whose use this node requires.

        A hint's place stays. A superseded node goes first, unless further uses of it are known.
        """
        placement = self._scores.placement(node.key)
        if placement[0] == RETAINED:
            return placement
        if node.superseded and placement[0] not in KNOWN_USES:
            return FINISHED, 0
        if self._scores.any_finished:
            above: CachedNode | None = node
            while above is not None:
                if above.finished:
                    return FINISHED, 0
                above = self._nodes.get(above.parent)
        return placement

    def _arrange(self, node: CachedNode) -> None:
        if node.id not in self._leaves or node.id in self._in_use:
            self._by_score.discard(node.id)
            self._by_use.discard(node.id)
            return
        group, position = self._placement(node)
        self._by_score.put(group, Entry(position, node.last_use, -node.begin, node.id))
        self._by_use.put(UNKNOWN, Entry(0, node.last_use, -node.begin, node.id))

    def _attach(self, node: CachedNode, parent: int, edge: Hashable) -> None:
        node.parent, node.edge = parent, edge
        self._by_edge.setdefault((parent, edge), {})[node.id] = None
        above = self._nodes.get(parent)
        if above is not None:
            above.children[node.id] = None
            if parent in self._leaves:
                del self._leaves[parent]
                self._in_use.pop(parent, None)
                self._arrange(above)

    def _detach(self, node: CachedNode) -> None:
        place = (node.parent, node.edge)
        siblings = self._by_edge[place]
        del siblings[node.id]
        if not siblings:
            del self._by_edge[place]
        above = self._nodes.get(node.parent)
        if above is not None:
            del above.children[node.id]
            if not above.children:
                self._leaves[above.id] = None
                self._arrange(above)
