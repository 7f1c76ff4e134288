"""Keeps the native mirror of the radix tree current: a step reads only the nodes that are new or may have moved."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest, RadixMirror, int64_array
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import TreeReader


class Known(NamedTuple):
    """Nodes of a batch's requests that the previous forest has found.

    Attributes:
        nodes: [num_requests] int64 node id of each request; updated in place.
        changed: batch indices whose entry in `nodes` must be looked up.
    """

    nodes: Int64Array
    changed: list[int]


class TreeMirror:
    """Forests of batches of one tree.

    Relies on two facts about SGLang's trees: node ids are never reused, and a split inserts a new node above the old
    one, which keeps its id, its end and its lower part. So a node is read when a request first ends at or below it. It
    is read again only if a node with children was inserted below its parent since, and a request of the batch uses it.

    Attributes:
        restarts: times that the tree was read from scratch because it contradicted the mirror.
        content: another number each time after the mirror has forgotten all nodes.
    """

    def __init__(self, reader: TreeReader) -> None:
        self._reader = reader
        self._mirror = RadixMirror()
        self._root = reader.root()
        self._roots: set[int] = set()
        self.restarts = 0
        self.content = 0

    def __len__(self) -> int:
        return len(self._mirror)

    def follow_root(self) -> None:
        """Forgets the tree if it has another content than was read."""
        root = self._reader.root()
        if root is not self._root and root != self._root:
            self.clear()
            self._root = root

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
            known: requests that need no look-up; None: look all up. Valid only if `content` is, after `follow_root`,
                what it was when these nodes were returned.

        Raises:
            ValueError: the tree contradicts itself, even when read from scratch.
        """
        if known is None:
            self.follow_root()
        try:
            return self._forest(handles, prefix_lens, live, known)
        except ValueError:
            # The tree changed while it was read, or the mirror forgot a node: read the present tree from scratch.
            self.restarts += 1
            self.clear()
            return self._forest(handles, prefix_lens, live, None)
        except Exception:  # broken off between the names of stale nodes and their reading
            self.clear()
            raise

    def clear(self) -> None:
        """Forgets the tree."""
        self.content += 1
        self._mirror.clear()
        self._roots.clear()

    def _forest(
        self, handles: list[Any], prefix_lens: Int64Array, live: npt.NDArray[np.bool_] | None, known: Known | None
    ) -> tuple[PrefixForest, Int64Array]:
        if known is None:
            nodes = int64_array(self._look_up(handles))
        else:
            nodes = known.nodes
            nodes[known.changed] = self._look_up([handles[index] for index in known.changed])
        forest = self._mirror.forest(nodes, prefix_lens, live)
        while stale := self._mirror.take_stale():
            on_paths = {request for _, request in stale}
            self._read(self._reader.find([node for node, _ in stale], [handles[request] for request in on_paths]))
            forest = self._mirror.forest(nodes, prefix_lens, live)
        return forest, nodes

    def _look_up(self, handles: list[Any]) -> list[int]:
        """The mirror's node of each handle, -1 for those that are roots or not in the tree. Reads new nodes."""
        ids = self._reader.ids(handles)
        present = set(ids)
        present.discard(-1)
        unknown = [node for node in present if not self._mirror.known(node) and node not in self._roots]
        absent = self._roots
        if unknown:
            handle_of = dict(zip(ids, handles, strict=True))
            sizes = self._read([handle_of[node] for node in unknown])
            self._roots.update(node for node, size in zip(unknown, sizes, strict=True) if size == 0)
            gone = {node for node, size in zip(unknown, sizes, strict=True) if size is None}
            absent = gone | self._roots
        return ids if absent.isdisjoint(ids) else [-1 if node in absent else node for node in ids]

    def _read(self, handles: list[Any]) -> list[int | None]:
        """Reads branches into the mirror; returns their numbers of nodes, 0 for roots and None for nodes not found."""
        sizes: list[int | None] = []
        for branch in self._reader.branches(handles, self._mirror.end_of):
            sizes.append(None if branch is None else len(branch.ids))
            if branch is not None and branch.ids:
                self._mirror.put(branch.parent, branch.begin, branch.ids, branch.ends, leaf=branch.leaf)
        return sizes
