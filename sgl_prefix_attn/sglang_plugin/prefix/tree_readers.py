"""Reads node paths out of SGLang's prefix cache, whichever kind of tree it is.

A path is the list of radix nodes from below the root to a node. A branch is the lower part of a path, below a node
that the caller knows. A reader is chosen by the tree's features, never by version. It only reads: the requests that use
the tree hold its locks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Refused

# One past the last position of a known node id; negative for an unknown one.
EndOf = Callable[[int], int]


class PathNode(NamedTuple):
    """A radix node on a path: positions [begin, end). A leaf has no children in the tree."""

    id: int
    begin: int
    end: int
    leaf: bool


Path = list[PathNode]


class Branch(NamedTuple):
    """A chain of radix nodes, each the parent of the next; no nodes for a root.

    Attributes:
        parent: id of the known node above, -1 for a root.
        begin: first KV position.
        ids: node ids from top to bottom.
        ends: one past the last KV position of each node.
        leaf: whether the last node has no children.
    """

    parent: int
    begin: int
    ids: list[int]
    ends: list[int]
    leaf: bool

    def path(self) -> Path:
        """The branch node by node."""
        last = len(self.ids) - 1
        begins = [self.begin, *self.ends][: len(self.ids)]
        return [
            PathNode(node, begin, end, self.leaf and index == last)
            for index, (node, begin, end) in enumerate(zip(self.ids, begins, self.ends, strict=True))
        ]


class TreeReader(Protocol):
    """Access to one prefix cache object."""

    name: str

    def root(self) -> object:
        """Identity of the tree's present content: another object or number after a reset."""

    def ids(self, handles: Sequence[Any]) -> list[int]:
        """Node id of each request's `last_node`; -1 for none and for handles that are not tree nodes."""

    def branches(self, handles: Sequence[Any], end_of: EndOf) -> Iterator[Branch | None]:
        """Branch of each `last_node` below its deepest ancestor that `end_of` knows; None if the tree lacks the node.

        Lazy: `end_of` may know the nodes of earlier branches. Then all branches together take time and memory
        proportional to the number of new nodes.
        """

    def find(self, ids: Collection[int], handles: Sequence[Any]) -> list[Any]:
        """Handles of those of `ids` that are on the paths of `handles`."""

    def paths(self, handles: Sequence[Any]) -> list[Path | None]:
        """Path of each `last_node`, empty for a root; None if the tree does not know the node."""


class _PathsFromBranches:
    """Whole paths of readers that implement `branches`."""

    def paths(self: Any, handles: Sequence[Any]) -> list[Path | None]:
        branches = self.branches(handles, _nothing_known)
        return [None if branch is None else branch.path() for branch in branches]


class _NumberedReader(_PathsFromBranches):
    """Trees whose requests hold node ids."""

    def ids(self, handles: Sequence[Any]) -> list[int]:
        if set(map(type, handles)) == {int}:
            return list(handles)
        return [handle if type(handle) is int else -1 for handle in handles]

    def find(self, ids: Collection[int], handles: Sequence[Any]) -> list[Any]:
        return list(ids)


class ObjectReader(_PathsFromBranches):
    """Trees whose requests hold node objects (`RadixCache` and the early unified cache)."""

    name = "node objects"

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def root(self) -> object:
        return self._tree.root_node

    def ids(self, handles: Sequence[Any]) -> list[int]:
        try:
            return list(map(_NODE_ID, handles))
        except AttributeError:  # a request without a node, or with a streaming session's virtual node
            return [handle.id if _is_node(handle) else -1 for handle in handles]

    def branches(self, handles: Sequence[Any], end_of: EndOf) -> Iterator[Branch | None]:
        for handle in handles:
            yield _branch(handle, _chain(handle, end_of), end_of) if _is_node(handle) else None

    def find(self, ids: Collection[int], handles: Sequence[Any]) -> list[Any]:
        wanted, found, seen = set(ids), [], set()
        for node in filter(_is_node, handles):
            while node.parent is not None and node.id not in seen:
                seen.add(node.id)
                if node.id in wanted:
                    found.append(node)
                node = node.parent
        return found


class NodeByIdReader(_NumberedReader):
    """Unified caches with the Python tree core: requests hold ids, `tree_core.node_by_id` gives the object."""

    name = "node_by_id"

    def __init__(self, tree: Any) -> None:
        self._core = tree.tree_core

    def root(self) -> object:
        return self._core.root_node

    def branches(self, handles: Sequence[Any], end_of: EndOf) -> Iterator[Branch | None]:
        for handle in handles:
            try:
                node = self._core.node_by_id(handle) if type(handle) is int else None
            except KeyError:
                node = None
            yield None if node is None else _branch(node, _chain(node, end_of), end_of)


class PathInfoReader(_NumberedReader):
    """Unified caches whose tree core hands out paths itself (`collect_path_info`): Python and Rust cores alike."""

    name = "collect_path_info"

    def __init__(self, tree: Any) -> None:
        self._core = tree.tree_core

    def root(self) -> object:
        return self._core.root_node_handle()

    def branches(self, handles: Sequence[Any], end_of: EndOf) -> Iterator[Branch | None]:
        # One handle at a time: the core makes whole paths, and those of many requests need not exist at once.
        for handle in handles:
            try:
                infos = self._core.collect_path_info([handle])[0] if type(handle) is int else None
            except KeyError:
                infos = None
            yield None if infos is None else _info_branch(infos, end_of)


def reader_for(tree: Any) -> TreeReader | Refused:
    """The reader for a prefix cache object, by what it can do."""
    kind = type(tree).__name__
    if getattr(tree, "disable", False) or kind.endswith("ChunkCache"):
        return Refused(fallback_reasons.NO_RADIX_CACHE, f"{kind} keeps no tree")
    # With --enable-streaming-session some versions wrap the tree.
    if not hasattr(tree, "tree_core") and not hasattr(tree, "root_node") and hasattr(tree, "inner"):
        return reader_for(tree.inner)
    core = getattr(tree, "tree_core", None)
    if core is not None:
        if hasattr(core, "collect_path_info"):
            return PathInfoReader(tree)
        if _walkable(core):
            return NodeByIdReader(tree)
        return Refused(
            fallback_reasons.UNKNOWN_TREE,
            f"{kind} with tree core {type(core).__name__} hands out neither nodes nor paths; "
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python selects a core that does",
        )
    root = getattr(tree, "root_node", None)
    if root is not None and _is_node(root):
        return ObjectReader(tree)
    return Refused(fallback_reasons.UNKNOWN_TREE, f"{kind} hands out neither nodes nor paths")


def _walkable(core: Any) -> bool:
    """Whether `node_by_id` exists and works: some native cores define it and raise."""
    if not hasattr(core, "node_by_id"):
        return False
    try:
        return _is_node(core.node_by_id(core.root_node_handle()))
    except (NotImplementedError, AttributeError, KeyError):
        return False


_NODE_ID = operator.attrgetter("id")


def _nothing_known(_: int) -> int:
    return -1


def _is_node(handle: Any) -> bool:
    return hasattr(handle, "parent") and hasattr(handle, "key") and hasattr(handle, "id")


def _chain(node: Any, end_of: EndOf) -> list[Any]:
    """`node` and its ancestors from the bottom up, below the first known ancestor or root; empty for a root."""
    chain: list[Any] = []
    parent = node.parent
    while parent is not None:
        chain.append(node)
        if end_of(parent.id) >= 0:
            break
        node, parent = parent, parent.parent
    return chain


def _branch(node: Any, chain: list[Any], end_of: EndOf) -> Branch:
    parent, begin = -1, 0
    if chain and chain[-1].parent.parent is not None:
        parent = chain[-1].parent.id
        begin = end_of(parent)
    chain.reverse()
    ends = list(accumulate([len(link.key) for link in chain], initial=begin))
    return Branch(parent, begin, [link.id for link in chain], ends[1:], not node.children)


def _info_branch(infos: Sequence[Any], end_of: EndOf) -> Branch:
    if not infos:
        return Branch(-1, 0, [], [], False)
    top = len(infos) - 1
    while top > 0 and end_of(infos[top - 1].node_id) < 0:
        top -= 1
    new = infos[top:]
    return Branch(
        infos[top - 1].node_id if top > 0 else -1,
        new[0].path_start,
        [info.node_id for info in new],
        [info.path_end for info in new],
        # 0.5.22 does not tell the number of children. A leaf taken for a node with children only costs time.
        getattr(new[-1], "num_children", 1) == 0,
    )
