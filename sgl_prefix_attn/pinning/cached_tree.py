"""What is cached, as a tree of nodes, and which of them to give up."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ROOT = -1


class Stretch(NamedTuple):
    """A node as the cache shows it: positions [begin, end) of the prompts that run through it.

    `leaf` says that nothing hangs below it, so it cannot be the upper part of a split.
    """

    handle: Any
    id: int
    begin: int
    end: int
    leaf: bool = False


@dataclass(slots=True)
class CachedNode:
    """A stretch of a cached prefix.

    Attributes:
        parent: id of the node above, ROOT if there is none.
        begin, end: token positions.
        keys: prefix keys of a prompt that runs through it.
        prompt: whatever the owner wants to find that prompt by.
        used: when it was last used, in uses of the whole cache.
        handle: the cache's own name for it.
        children: ids of the nodes below it.
    """

    id: int
    parent: int
    begin: int
    end: int
    keys: Sequence[int]
    prompt: Any
    used: int
    handle: Any
    children: dict[int, None] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.end - self.begin


class CachedTree:
    """Nodes by id. Ids are never used twice; a split puts a new node above the lower part, which keeps its id.

    Args:
        block: tokens per key.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._nodes: dict[int, CachedNode] = {}
        self._leaves: dict[int, None] = {}
        self._top: dict[int, None] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes

    @property
    def tokens(self) -> int:
        """Tokens of all nodes (slow: for tests)."""
        return sum(node.tokens for node in self._nodes.values())

    def used(self, path: Iterable[Stretch], keys: Sequence[int], prompt: Any = None) -> list[int]:
        """A request used, or left behind, this path from the root down.

        Args:
            keys: the request's prefix keys.
            prompt: kept with the nodes.

        Returns:
            Nodes that a split may have moved below a new node of the path: look at them and `place` them again.
        """
        self._uses += 1
        return self._put(path, keys, prompt, self._uses)

    def seen(self, path: Iterable[Stretch], keys: Sequence[int], prompt: Any = None) -> list[int]:
        """As `used`, for a path that was found but not used."""
        return self._put(path, keys, prompt, 0)

    def place(self, path: Sequence[Stretch]) -> list[int]:
        """Says where the last node of a path is now. Returns what `used` returns."""
        last = self._nodes.get(path[-1].id)
        return [] if last is None else self._put(path, last.keys, last.prompt, last.used)

    def parent_of(self, node_id: int) -> int:
        """The node above, as far as known; ROOT if there is none or the node is unknown."""
        node = self._nodes.get(node_id)
        return ROOT if node is None else node.parent

    def leaves(self) -> list[CachedNode]:
        """Nodes that nothing known hangs below."""
        return [self._nodes[node_id] for node_id in self._leaves]

    def get(self, node_id: int) -> CachedNode | None:
        return self._nodes.get(node_id)

    def drop(self, node_id: int) -> None:
        """The leaf is no longer cached."""
        node = self._nodes.pop(node_id)
        self._leaves.pop(node_id, None)
        self._detach(node)

    def clear(self) -> None:
        self._nodes.clear()
        self._leaves.clear()
        self._top.clear()

    def key(self, node: CachedNode) -> int | None:
        """What the worth of a node is asked by; None for a remainder shorter than a block.

        It is the key of the block in which the node begins: who uses anything of the node uses that.
        """
        index = node.begin // self._block
        return node.keys[index] if index < len(node.keys) else None

    def give_up(
        self,
        tokens: int,
        worth: Callable[[int | None], float],
        keep: Callable[[CachedNode], bool] | None = None,
        *,
        spent: bool = False,
    ) -> list[CachedNode]:
        """The nodes to evict for `tokens` tokens, in order: the least worth first, then the least recently used.

        Only leaves can go; a node becomes one when all below it is given up. Nothing is changed.

        Args:
            keep: nodes that cannot go.
            spent: whether nodes can have a negative worth. Nothing below such a node is worth more than it: who uses
                that would have to use the node as well.
        """

        def rank(node: CachedNode) -> tuple[float, int, int, int]:
            value = worth(self.key(node))
            above = self._nodes.get(node.parent) if spent else None
            while value >= 0 and above is not None:
                inherited = worth(self.key(above))
                value = inherited if inherited < 0 else value
                above = self._nodes.get(above.parent)
            return (value, node.used, -node.begin, node.id)

        heap = [rank(node) for node in self.leaves() if keep is None or not keep(node)]
        heapq.heapify(heap)
        gone: dict[int, int] = {}  # node -> children given up
        chosen: list[CachedNode] = []
        while tokens > 0 and heap:
            node = self._nodes[heapq.heappop(heap)[3]]
            chosen.append(node)
            tokens -= node.tokens
            parent = self._nodes.get(node.parent)
            if parent is None:
                continue
            gone[parent.id] = gone.get(parent.id, 0) + 1
            if gone[parent.id] == len(parent.children) and (keep is None or not keep(parent)):
                heapq.heappush(heap, rank(parent))
        return chosen

    def _put(self, path: Iterable[Stretch], keys: Sequence[int], prompt: Any, used: int) -> list[int]:
        parent = ROOT
        suspects: list[int] = []
        for handle, node_id, begin, end, leaf in path:
            node = self._nodes.get(node_id)
            if node is None:
                if not leaf:
                    suspects += [other for other in self._below(parent) if self._nodes[other].end > end]
                node = CachedNode(node_id, parent, begin, end, keys, prompt, used, handle)
                self._nodes[node_id] = node
                self._leaves[node_id] = None
                self._attach(node)
            else:
                if node.parent != parent:
                    self._detach(node)
                    node.parent = parent
                    self._attach(node)
                node.begin, node.end, node.handle = begin, end, handle
                if used > node.used:
                    node.used = used
                    if len(keys) * self._block > begin:
                        node.keys, node.prompt = keys, prompt
            parent = node_id
        return suspects

    def _below(self, parent: int) -> dict[int, None]:
        node = self._nodes.get(parent)
        return self._top if node is None else node.children

    def _attach(self, node: CachedNode) -> None:
        self._below(node.parent)[node.id] = None
        self._leaves.pop(node.parent, None)

    def _detach(self, node: CachedNode) -> None:
        self._below(node.parent).pop(node.id, None)
        parent = self._nodes.get(node.parent)
        if parent is not None and not parent.children:
            self._leaves[parent.id] = None
