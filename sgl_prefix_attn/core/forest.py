"""The KV positions that requests of a batch share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import sgl_prefix_attn._native as _native

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Segment = tuple[int, int, int]


def int64_array(values: npt.ArrayLike) -> Int64Array:
    """`values` as the native module reads them: int64 and contiguous. Copies only where they are not."""
    return np.ascontiguousarray(values, dtype=np.int64)


class PrefixForest:
    """Shared-prefix structure of one batch, immutable.

    A node is a range of KV positions that at least two requests share. Nodes stand in depth-first preorder; a node's
    requests are `order[node_first:node_last]`. A request's tail is its own positions, from `tail_begin` on. Made by
    `from_paths`, or by a `RadixMirror` in a server. All arrays are int32 and read-only.
    """

    __slots__ = ("native",)

    def __init__(self, native: _native.Forest) -> None:
        self.native = native

    @classmethod
    def from_paths(
        cls, paths: Sequence[Sequence[Segment]], *, prefix_lens: Sequence[int] | None = None
    ) -> PrefixForest:
        """Builds the forest of a batch from radix-tree paths.

        Args:
            paths: by batch index, the request's `(node id, start, end)` segments from position 0 on, each starting
                where the previous one ends. Requests share a node if they name the same id. A path may be empty.
            prefix_lens: by batch index, the positions that existed before this step: sequence length minus new
                tokens. A node that reaches beyond is private to the request. Default: the end of the path.

        Raises:
            ValueError: an empty, negative or disconnected segment, or a node id with two ranges or two parents. The
                message names request and segment.
        """
        ranges: dict[int, tuple[int, int, int]] = {}
        mirror = _native.RadixMirror()
        last_nodes = np.full(len(paths), -1, dtype=np.int64)
        ends = np.zeros(len(paths), dtype=np.int64)
        for request, path in enumerate(paths):
            parent, position = -1, 0
            branch_parent, branch_begin = -1, 0
            new_ids: list[int] = []
            new_ends: list[int] = []
            for index, (node, start, end) in enumerate(path):
                where = f"request {request}, segment {index} (node {node}, [{start}, {end}))"
                if not 0 <= node < 2**63:
                    raise ValueError(f"{where}: expected a node id from 0 to 2^63 - 1")
                if start != position or end <= start:
                    raise ValueError(f"{where}: expected a range that starts at {position} and is not empty")
                if end >= 2**31:
                    raise ValueError(f"{where}: expected an end of at most 2^31 - 1")
                known = ranges.get(node)
                if known is None:
                    ranges[node] = (parent, start, end)
                    if not new_ids:
                        branch_parent, branch_begin = parent, start
                    new_ids.append(node)
                    new_ends.append(end)
                elif known != (parent, start, end):
                    raise ValueError(
                        f"{where}: another request has this node as [{known[1]}, {known[2]}) below node {known[0]}"
                    )
                parent, position = node, end
            if new_ids:
                mirror.put(parent_id=branch_parent, begin=branch_begin, ids=new_ids, ends=new_ends, leaf=True)
            last_nodes[request], ends[request] = parent, position
        if prefix_lens is not None:
            if len(prefix_lens) != len(paths):
                raise ValueError(f"prefix_lens has {len(prefix_lens)} entries for {len(paths)} requests")
            ends = int64_array(prefix_lens)
        return cls(mirror.forest(last_nodes, ends))

    @property
    def num_requests(self) -> int:
        return self.native.num_requests

    @property
    def num_nodes(self) -> int:
        return self.native.num_nodes

    @property
    def order(self) -> Int32Array:
        """[num_requests] batch indices, depth first."""
        return self.native.order

    @property
    def node_parent(self) -> Int32Array:
        """[num_nodes] index of the parent node, or -1."""
        return self.native.node_parent

    @property
    def node_begin(self) -> Int32Array:
        """[num_nodes] first KV position."""
        return self.native.node_begin

    @property
    def node_end(self) -> Int32Array:
        """[num_nodes] one past the last KV position."""
        return self.native.node_end

    @property
    def node_first(self) -> Int32Array:
        """[num_nodes] start of the node's requests in `order`."""
        return self.native.node_first

    @property
    def node_last(self) -> Int32Array:
        """[num_nodes] end of the node's requests in `order`."""
        return self.native.node_last

    @property
    def node_request(self) -> Int32Array:
        """[num_nodes] batch index of the request whose KV slots stand for all."""
        return self.native.node_request

    @property
    def tail_begin(self) -> Int32Array:
        """[num_requests] by batch index: first KV position that is the request's own."""
        return self.native.tail_begin

    @property
    def tail_node(self) -> Int32Array:
        """[num_requests] by batch index: deepest node of the request, or -1."""
        return self.native.tail_node

    def paths(self) -> list[list[Segment]]:
        """The shared segments of each request from position 0 on, as (node index, start, end)."""
        parents, begins, ends = self.node_parent.tolist(), self.node_begin.tolist(), self.node_end.tolist()
        paths = []
        for node in self.tail_node.tolist():
            path: list[Segment] = []
            while node >= 0:
                path.append((node, begins[node], ends[node]))
                node = parents[node]
            path.reverse()
            paths.append(path)
        return paths

    def __repr__(self) -> str:
        return f"PrefixForest({self.num_requests} requests, {self.num_nodes} shared nodes)"


class RadixMirror:
    """Native copy of the part of a radix tree that running requests use: node ids and position ranges only.

    SGLang never reuses a node id, and a split leaves the id with the suffix. So a known node's end never changes. The
    copy can lack a node that a split has inserted above a known one: `take_stale` names the nodes to read again. It
    never claims sharing that is not there. Nodes that no forest used for a long time are forgotten.

    Attributes:
        known: whether a node id is known.
        end_of: one past the last KV position of a node id; -1 if it is not known.
    """

    __slots__ = ("_native", "end_of", "known")

    def __init__(self) -> None:
        self._native = _native.RadixMirror()
        # Bound methods of the native object: readers call them once per node.
        self.known = self._native.known
        self.end_of = self._native.end_of

    def __len__(self) -> int:
        return len(self._native)

    def put(self, parent_id: int, begin: int, ids: Sequence[int], ends: Sequence[int], *, leaf: bool) -> None:
        """Inserts or updates a branch: a chain of nodes, each the parent of the next.

        Args:
            parent_id: node above the branch, -1 for a root.
            begin: first KV position of the branch.
            ids: the nodes from top to bottom.
            ends: one past the last KV position of each node.
            leaf: whether the last node has no children in the tree.

        Raises:
            ValueError: unknown parent, empty range, a range that does not continue the parent's, or another end than
                the node was known with.
        """
        self._native.put(parent_id=parent_id, begin=begin, ids=ids, ends=ends, leaf=leaf)

    def forest(
        self, last_nodes: Int64Array, prefix_lens: Int64Array, live: npt.NDArray[np.bool_] | None = None
    ) -> PrefixForest:
        """The forest of a batch.

        Args:
            last_nodes: [num_requests] int64, deepest node of each request; -1 for none.
            prefix_lens: [num_requests] int64, positions that existed before this step; a node beyond is private.
            live: [num_requests] bool, False for requests whose KV may be released already: they share nothing.

        Raises:
            ValueError: unknown node, negative prefix length, wrong shape.
        """
        return PrefixForest(self._native.forest(last_nodes, prefix_lens, live))

    def take_stale(self) -> list[tuple[int, int]]:
        """Nodes of the last forest whose parent a split may have changed since they were put; each is named once.

        Read them again, put what was read, and ask for the forest again.

        Returns:
            (node, batch index of a request on whose path it is).
        """
        return self._native.take_stale()

    def clear(self) -> None:
        """Forgets all nodes."""
        self._native.clear()
