"""Keeps the native mirror of the radix tree current, reading no more of the tree than has changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest, RadixMirror
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import Path, TreeReader


class Known(NamedTuple):
    """What is known of a batch's requests beforehand.

    Attributes:
        nodes: [num_requests] int64 node of each request, as the forest before gave it; is written to.
        changed: batch indices whose entry in `nodes` is to be looked up.
    """

    nodes: Int64Array
    changed: list[int]


class TreeMirror:
    """Forests of batches of one tree.

    Rests on two facts about SGLang's trees: node ids are never reused, and splitting a node puts a new node above it,
    so a known id keeps standing for the same KV of the same requests (its lower part). A node is therefore read
    when a request first ends in it, and read again only if a new stock node turns up where a split may have put it.

    Attributes:
        restarts: times that the tree had to be read from scratch because it contradicted what was known.
    """

    def __init__(self, reader: TreeReader) -> None:
        self._reader = reader
        self._mirror = RadixMirror()
        self._root = reader.root()
        self._roots: set[int] = set()
        self.restarts = 0

    def __len__(self) -> int:
        return len(self._mirror)

    def follows_root(self) -> bool:
        """Whether the tree's content is still the one that was read; if not, forgets it."""
        root = self._reader.root()
        if root is self._root or root == self._root:
            return True
        self.clear()
        self._root = root
        return False

    def forest(
        self,
        handles: list[Any],
        prefix_lens: Int64Array,
        live: npt.NDArray[np.bool_] | None,
        known: Known | None = None,
    ) -> tuple[PrefixForest, Int64Array]:
        """The forest of a batch, and the node of each request as `Known.nodes` wants it next time.

        Args:
            handles: each request's `last_node`.
            prefix_lens: [num_requests] positions that existed before this step.
            live: [num_requests] False where the request's KV may be released already; None: all live.
            known: requests that need no look-up; None: look all up. Of a tree that `follows_root` said is the same.

        Raises:
            ValueError: the tree contradicts itself even when read from scratch.
        """
        self.follows_root()
        try:
            return self._forest(handles, prefix_lens, live, known)
        except ValueError:
            # Something was read at an unlucky moment, or forgotten meanwhile: start over with the tree as it is now.
            self.restarts += 1
            self.clear()
            return self._forest(handles, prefix_lens, live, None)

    def clear(self) -> None:
        """Forgets the tree."""
        self._mirror.clear()
        self._roots.clear()

    def _forest(
        self, handles: list[Any], prefix_lens: Int64Array, live: npt.NDArray[np.bool_] | None, known: Known | None
    ) -> tuple[PrefixForest, Int64Array]:
        if known is None:
            nodes = np.array(self._look_up(handles), dtype=np.int64)
        else:
            nodes = known.nodes
            nodes[known.changed] = self._look_up([handles[index] for index in known.changed])
        return self._mirror.forest(nodes, prefix_lens, live), nodes

    def _look_up(self, handles: list[Any]) -> list[int]:
        """The mirror's node of each handle, -1 for those that are roots or not in the tree. Reads what is new."""
        ids = self._reader.ids(handles)
        present = set(ids)
        present.discard(-1)
        unknown = [node for node in present if not self._mirror.known(node) and node not in self._roots]
        gone = self._learn(unknown, ids, handles) if unknown else set()
        nowhere = gone | self._roots
        return ids if nowhere.isdisjoint(ids) else [-1 if node in nowhere else node for node in ids]

    def _learn(self, unknown: list[int], ids: list[int], handles: list[Any]) -> set[int]:
        """Reads the paths of new nodes; returns those that the tree does not have."""
        handle_of = dict(zip(ids, handles, strict=True))
        gone: set[int] = set()
        stock: list[tuple[int, int, int]] = []
        read: set[int] = set()
        for node, path in zip(unknown, self._reader.paths([handle_of[node] for node in unknown]), strict=True):
            if path is None:
                gone.add(node)
            elif not path:
                self._roots.add(node)
            else:
                self._put(path, stock, read)
        while stock:
            parent, begin, end = stock.pop()
            for path in self._reader.moved(self._mirror.split_suspects(parent, begin, end), parent):
                self._put(path, stock, read)
        return gone

    def _put(self, path: Path, stock: list[tuple[int, int, int]], read: set[int]) -> None:
        """Puts a path into the mirror but for nodes `read` just now; adds new stock ones, below which splits may be."""
        begin = len(path)
        while begin > 0 and path[begin - 1].id not in read:
            begin -= 1
        parent = path[begin - 1].id if begin > 0 else -1
        for node in path[begin:]:
            read.add(node.id)
            if not node.leaf and not self._mirror.known(node.id):
                stock.append((parent, node.begin, node.end))
            self._mirror.put(node.id, parent, node.begin, node.end)
            parent = node.id
