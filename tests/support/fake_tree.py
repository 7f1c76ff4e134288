"""Radix trees of plain nodes, without tokens and without SGLang: as large and as deep as a test needs."""

from __future__ import annotations

from typing import Any


class Node:
    """What readers look at of a tree node. `key` is as long as the node has positions."""

    def __init__(self, node_id: int, parent: Node | None, tokens: int) -> None:
        self.id, self.parent, self.key = node_id, parent, range(tokens)
        self.children: dict[int, Node] = {}
        if parent is not None:
            parent.children[node_id] = self


class FakeTree:
    """A tree whose requests hold node objects (`reader_for` reads it through ObjectReader)."""

    def __init__(self) -> None:
        self.disable = False
        self._ids = iter(range(1 << 30))
        self.root_node = self._new(None, 0)

    def _new(self, parent: Node | None, tokens: int) -> Node:
        return Node(next(self._ids), parent, tokens)

    def add(self, parent: Node | None = None, tokens: int = 1) -> Node:
        """A new child, of the root by default."""
        return self._new(self.root_node if parent is None else parent, tokens)

    def chain(self, length: int, tokens: int = 1) -> list[Node]:
        """New nodes from below the root, each the parent of the next."""
        nodes = [self.add(None, tokens)]
        while len(nodes) < length:
            nodes.append(self.add(nodes[-1], tokens))
        return nodes

    def split(self, node: Node, tokens: int) -> Node:
        """Moves a node's first positions into a new node above it, as SGLang's trees do."""
        above: Any = node.parent
        del above.children[node.id]
        upper = self.add(above, tokens)
        node.key, node.parent = range(len(node.key) - tokens), upper
        upper.children[node.id] = node
        return upper


def path_of(node: Node) -> list[tuple[int, int, int]]:
    """(id, begin, end) of each node from below the root to `node`."""
    chain = []
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    path, position = [], 0
    for link in reversed(chain):
        path.append((link.id, position, position + len(link.key)))
        position += len(link.key)
    return path
