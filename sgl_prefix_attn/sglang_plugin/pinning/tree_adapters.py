"""Locks in SGLang's prefix cache: one adapter per generation of the cache, chosen by what the cache can do.

A lock keeps the whole path to a node from being evicted. Locks taken here are the cache's own (requests take the same),
so SGLang's accounting stays right; each is released exactly once, with what taking it returned.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sgl_prefix_attn.pinning import ROOT, Stretch
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import TreeReader, Unreadable, parent_of, reader_for


class Namespace(NamedTuple):
    """Prompts of different namespaces share nothing: LoRA adapter and the like, and the user's cache salt."""

    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def text(self) -> str | None:
        """One string for both, None for the plain namespace."""
        if self.extra_key is None and self.cache_salt is None:
            return None
        return f"{len(self.extra_key or '')}:{self.extra_key or ''}{self.cache_salt or ''}"

    @classmethod
    def of_request(cls, request: Any) -> Namespace:
        return cls(request.extra_key or None, getattr(request, "cache_salt", None) or None)


PLAIN = Namespace()


class NodeLock(NamedTuple):
    """A lock that is held: the node, and what the cache wants back to release it."""

    handle: Any
    receipt: Any


class LockableTree(Protocol):
    """A prefix cache whose nodes can be found, followed and locked."""

    name: str

    def namespace(self, asked: Namespace) -> Namespace:
        """The namespace as the cache keeps it, which is what requests that were sent with it carry."""

    def root(self) -> object:
        """Identity of the tree's present content: another one after a reset."""

    def find(self, tokens: Sequence[int], namespace: Namespace) -> Any | None:
        """Handle of the deepest node of what is cached of the tokens, split off exactly there; None if nothing is."""

    def path(self, handle: Any) -> list[Stretch]:
        """The nodes from below the root to this one; empty if it is gone."""

    def moved(self, ids: Sequence[int], handles: Sequence[Any], parent_id: int) -> list[list[Stretch]]:
        """Paths of those nodes that no longer hang below `parent_id` (ROOT: a root)."""

    def alive(self, handle: Any) -> bool:
        """Whether the node is still in the tree."""

    def in_use(self, handle: Any) -> bool:
        """Whether somebody holds a lock on the node, as far as the cache tells."""

    def lock(self, handle: Any) -> NodeLock: ...

    def release(self, lock: NodeLock) -> None: ...


class _Tree:
    """What all generations have in common."""

    name = ""

    def __init__(self, tree: Any, reader: TreeReader) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self._tree = tree
        self._reader = reader
        self._match_params = MatchPrefixParams
        self._radix_key = RadixKey
        self._takes_salt = "cache_salt" in inspect.signature(RadixKey).parameters

    def namespace(self, asked: Namespace) -> Namespace:
        if self._takes_salt or asked.cache_salt is None:
            return asked
        # SGLang up to 0.5.17 joins both where requests come in, in this order, and knows only the result afterwards.
        return Namespace(asked.cache_salt + (asked.extra_key or ""))

    def root(self) -> object:
        return self._reader.root()

    def find(self, tokens: Sequence[int], namespace: Namespace) -> Any | None:
        ids = tokens if isinstance(tokens, array) else array("q", tokens)
        salt = {} if namespace.cache_salt is None else {"cache_salt": namespace.cache_salt}
        key = self._radix_key(ids, namespace.extra_key, **salt)
        handle = self._tree.match_prefix(self._match_params(key=key)).last_device_node
        return handle if self.path(handle) else None

    def path(self, handle: Any) -> list[Stretch]:
        raise NotImplementedError


class ObjectTree(_Tree):
    """`RadixCache`: nodes are objects, a lock is a count on each node of the path."""

    name = "counts on node objects"

    def path(self, handle: Any) -> list[Stretch]:
        chain = []
        node = handle
        while node.parent is not None:
            chain.append(node)
            node = node.parent
        result, begin = [], 0
        for node in reversed(chain):
            end = begin + len(node.key)
            result.append(Stretch(node, node.id, begin, end, not node.children))
            begin = end
        return result

    def moved(self, ids: Sequence[int], handles: Sequence[Any], parent_id: int) -> list[list[Stretch]]:
        return [self.path(node) for node in handles if _parent_id(node) != parent_id]

    def alive(self, handle: Any) -> bool:
        # A node is deleted as an unlocked leaf, and leaves that can be evicted are listed.
        return handle.lock_ref > 0 or bool(handle.children) or handle in self._tree.evictable_leaves

    def in_use(self, handle: Any) -> bool:
        return handle.lock_ref > 0

    def lock(self, handle: Any) -> NodeLock:
        self._tree.inc_lock_ref(handle)
        return NodeLock(handle, None)

    def release(self, lock: NodeLock) -> None:
        self._tree.dec_lock_ref(lock.handle)


class ReceiptTree(_Tree):
    """`UnifiedRadixCache` up to 0.5.22: nodes are numbers, a lock is released with the receipt it was given."""

    name = "receipts for node numbers"

    def path(self, handle: Any) -> list[Stretch]:
        (path,) = self._reader.paths([handle])
        return [Stretch(node.id, node.id, node.begin, node.end, node.leaf) for node in path or ()]

    def moved(self, ids: Sequence[int], handles: Sequence[Any], parent_id: int) -> list[list[Stretch]]:
        return [
            [Stretch(node.id, node.id, node.begin, node.end, node.leaf) for node in path]
            for path in self._reader.paths(ids)
            if path and parent_of(path) != (-1 if parent_id == ROOT else parent_id)
        ]

    def alive(self, handle: Any) -> bool:
        return bool(self.path(handle))

    def in_use(self, handle: Any) -> bool:
        core = self._tree.tree_core
        try:
            node = core.node_by_id(handle)
        except NotImplementedError:  # a native core: it says how much is locked, not what
            return False
        return any(data.lock_ref > 0 for data in node.component_data)

    def lock(self, handle: Any) -> NodeLock:
        return NodeLock(handle, self._tree.inc_lock_ref(handle).to_dec_params())

    def release(self, lock: NodeLock) -> None:
        self._tree.dec_lock_ref(lock.handle, lock.receipt)


class TreeLockTree(ReceiptTree):
    """`UnifiedRadixCache` of 0.5.23: it makes the lock object itself."""

    name = "tree locks"

    def lock(self, handle: Any) -> NodeLock:
        return NodeLock(handle, self._tree.lock(handle))

    def release(self, lock: NodeLock) -> None:
        self._tree.unlock(lock.receipt)


def lockable_tree(tree: Any) -> LockableTree | Unreadable:
    """The adapter for a prefix cache object, or why there is none."""
    reader = reader_for(tree)
    if isinstance(reader, Unreadable):
        return reader
    for feature in ("supports_swa", "supports_mamba"):
        if hasattr(tree, feature) and getattr(tree, feature)():
            return Unreadable(
                "unknown_tree", f"{type(tree).__name__} keeps more than one kind of state per node ({feature})"
            )
    if not hasattr(tree, "tree_core"):
        return ObjectTree(tree, reader)
    if hasattr(tree, "lock") and hasattr(tree, "unlock"):
        return TreeLockTree(tree, reader)
    return ReceiptTree(tree, reader)


def _parent_id(node: Any) -> int:
    parent = node.parent
    return ROOT if parent is None or parent.parent is None else int(parent.id)
