"""Reads node paths out of SGLang's prefix cache, whichever kind of tree it is.

A path is the list of radix nodes from below the root to a node, each with the token positions it holds. A reader is
chosen by what the tree can do, never by version. Only reads; the tree is locked by the requests that use it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons


class PathNode(NamedTuple):
    """A radix node on a path: positions [begin, end). A leaf has no children in the tree."""

    id: int
    begin: int
    end: int
    leaf: bool


Path = list[PathNode]


class TreeReader(Protocol):
    """Access to one prefix cache object."""

    name: str

    def root(self) -> object:
        """Identity of the tree's present content: another object or number after a reset."""

    def ids(self, handles: Sequence[Any]) -> list[int]:
        """Node id of each request's `last_node`; -1 for none and for handles that are not tree nodes."""

    def paths(self, handles: Sequence[Any]) -> list[Path | None]:
        """Path of each `last_node`, empty for a root; None if the tree does not know the node."""

    def moved(self, ids: Sequence[int], parent_id: int) -> list[Path]:
        """Present paths of those of `ids` whose parent is no longer `parent_id` (-1: a root)."""


class ObjectReader:
    """Trees whose requests hold node objects (`RadixCache` and the early unified cache)."""

    name = "node objects"

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        # Nodes by id, for `moved`: weak, so that an evicted node's KV indices are not kept alive by us.
        self._nodes: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def root(self) -> object:
        return self._tree.root_node

    def ids(self, handles: Sequence[Any]) -> list[int]:
        try:
            return list(map(_NODE_ID, handles))
        except AttributeError:  # a request without a node, or with a streaming session's virtual node
            return [handle.id if _is_node(handle) else -1 for handle in handles]

    def paths(self, handles: Sequence[Any]) -> list[Path | None]:
        walk = _Walk()
        paths = [walk.path(handle) if _is_node(handle) else None for handle in handles]
        self._nodes.update(walk.nodes)
        return paths

    def moved(self, ids: Sequence[int], parent_id: int) -> list[Path]:
        walk = _Walk()
        found: list[Path] = []
        for node_id in ids:
            node = self._nodes.get(node_id)
            if node is not None and _parent_id(node) != parent_id:
                found.append(walk.path(node))
        self._nodes.update(walk.nodes)
        return found


class NodeByIdReader:
    """Unified caches with the Python tree core: requests hold ids, `tree_core.node_by_id` gives the object."""

    name = "node_by_id"

    def __init__(self, tree: Any) -> None:
        self._core = tree.tree_core

    def root(self) -> object:
        return self._core.root_node

    def ids(self, handles: Sequence[Any]) -> list[int]:
        return _int_ids(handles)

    def paths(self, handles: Sequence[Any]) -> list[Path | None]:
        walk = _Walk()
        nodes = [self._node(handle) if type(handle) is int else None for handle in handles]
        return [None if node is None else walk.path(node) for node in nodes]

    def moved(self, ids: Sequence[int], parent_id: int) -> list[Path]:
        walk = _Walk()
        found: list[Path] = []
        for node_id in ids:
            node = self._node(node_id)
            if node is not None and _parent_id(node) != parent_id:
                found.append(walk.path(node))
        return found

    def _node(self, handle: Any) -> Any | None:
        try:
            return self._core.node_by_id(handle)
        except KeyError:
            return None


class PathInfoReader:
    """Unified caches whose tree core hands out paths itself (`collect_path_info`): Python and Rust cores alike."""

    name = "collect_path_info"

    def __init__(self, tree: Any) -> None:
        self._core = tree.tree_core

    def root(self) -> object:
        return self._core.root_node_handle()

    def ids(self, handles: Sequence[Any]) -> list[int]:
        return _int_ids(handles)

    def paths(self, handles: Sequence[Any]) -> list[Path | None]:
        return [None if infos is None else _info_path(infos) for infos in self._collect(handles)]

    def moved(self, ids: Sequence[int], parent_id: int) -> list[Path]:
        found: list[Path] = []
        for infos in self._collect(ids):
            if not infos:
                continue
            last = infos[-1]
            if (last.parent_id if last.path_start > 0 else -1) != parent_id:
                found.append(_info_path(infos))
        return found

    def _collect(self, handles: Sequence[Any]) -> list[Any]:
        if _only_ints(handles):
            try:
                return list(self._core.collect_path_info(handles))
            except KeyError:
                pass  # one node is gone: ask for each by itself
        return [self._collect_one(handle) for handle in handles]

    def _collect_one(self, handle: Any) -> Any | None:
        if type(handle) is not int:
            return None
        try:
            return self._core.collect_path_info([handle])[0]
        except KeyError:
            return None


class Unreadable(NamedTuple):
    """Why a prefix cache cannot be read: a reason of `reasons.EXPLANATIONS` and what was found."""

    reason: str
    detail: str


def reader_for(tree: Any) -> TreeReader | Unreadable:
    """The reader for a prefix cache object, by what it can do."""
    kind = type(tree).__name__
    if getattr(tree, "disable", False) or kind.endswith("ChunkCache"):
        return Unreadable(fallback_reasons.NO_RADIX_CACHE, f"{kind} keeps no tree")
    # With --enable-streaming-session some versions wrap the tree.
    if not hasattr(tree, "tree_core") and not hasattr(tree, "root_node") and hasattr(tree, "inner"):
        return reader_for(tree.inner)
    core = getattr(tree, "tree_core", None)
    if core is not None:
        if hasattr(core, "collect_path_info"):
            return PathInfoReader(tree)
        if _walkable(core):
            return NodeByIdReader(tree)
        return Unreadable(
            fallback_reasons.UNKNOWN_TREE,
            f"{kind} with tree core {type(core).__name__} hands out neither nodes nor paths; "
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python selects a core that does",
        )
    root = getattr(tree, "root_node", None)
    if root is not None and _is_node(root):
        return ObjectReader(tree)
    return Unreadable(fallback_reasons.UNKNOWN_TREE, f"{kind} hands out neither nodes nor paths")


def _walkable(core: Any) -> bool:
    """Whether `node_by_id` is there and implemented: some native cores have it only to raise."""
    if not hasattr(core, "node_by_id"):
        return False
    try:
        return _is_node(core.node_by_id(core.root_node_handle()))
    except (NotImplementedError, AttributeError, KeyError):
        return False


_NODE_ID = operator.attrgetter("id")


def _is_node(handle: Any) -> bool:
    return hasattr(handle, "parent") and hasattr(handle, "key") and hasattr(handle, "id")


def _only_ints(handles: Sequence[Any]) -> bool:
    return set(map(type, handles)) == {int}


def _int_ids(handles: Sequence[Any]) -> list[int]:
    if _only_ints(handles):
        return list(handles)
    return [handle if type(handle) is int else -1 for handle in handles]


def _parent_id(node: Any) -> int:
    """Id of the parent, -1 if that is a root."""
    parent = node.parent
    return -1 if parent is None or parent.parent is None else parent.id


class _Walk:
    """Paths of several nodes of a tree that does not change meanwhile: what they have in common is walked once.

    Attributes:
        nodes: all nodes of the paths, by id.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, Any] = {}
        self._paths: dict[int, Path] = {}

    def path(self, node: Any) -> Path:
        """The nodes below the root down to `node`."""
        new = []
        while node.parent is not None and node.id not in self._paths:
            new.append(node)
            node = node.parent
        path = self._paths.get(node.id, [])
        position = path[-1].end if path else 0
        for link in reversed(new):
            end = position + len(link.key)
            path = [*path, PathNode(link.id, position, end, not link.children)]
            position = end
            self.nodes[link.id] = link
            self._paths[link.id] = path
        return path


def _info_path(infos: Iterable[Any]) -> Path:
    # 0.5.22 does not tell the number of children yet; taking a leaf for a stock node only costs a look more.
    return [
        PathNode(info.node_id, info.path_start, info.path_end, getattr(info, "num_children", 1) == 0) for info in infos
    ]
