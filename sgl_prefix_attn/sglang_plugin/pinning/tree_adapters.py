"""Locks and evictions in SGLang's prefix cache: one adapter per generation of the cache, chosen by its features.

A lock keeps the whole path to a node from being evicted. Locks taken here are the cache's own, as requests take them,
so SGLang's accounting stays right. Each lock is released exactly once, with the receipt that taking it returned.
"""

from __future__ import annotations

import inspect
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sgl_prefix_attn.pinning import ROOT, NodeSpan
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import PathNode, TreeReader, reader_for
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import UNKNOWN_TREE, Refused

logger = logging.getLogger(__name__)


class Namespace(NamedTuple):
    """Separates prompts that share nothing: SGLang's extra key (a LoRA adapter, for example) and the cache salt."""

    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def text(self) -> str | None:
        """Both as one string, None for the plain namespace."""
        if self.extra_key is None and self.cache_salt is None:
            return None
        return f"{len(self.extra_key or '')}:{self.extra_key or ''}{self.cache_salt or ''}"

    @classmethod
    def of_request(cls, request: Any) -> Namespace:
        return cls(request.extra_key or None, getattr(request, "cache_salt", None) or None)


PLAIN = Namespace()


class NodeLock(NamedTuple):
    """A lock on a node, and the receipt that releases it."""

    handle: Any
    receipt: Any


class LockableTree(Protocol):
    """A prefix cache whose nodes can be found, locked and evicted.

    Attributes:
        name: how the cache is accessed, for the log.
        can_evict: whether `evict` works; False is final.
    """

    name: str
    can_evict: bool

    @property
    def page_size(self) -> int:
        """Tokens per page; nodes begin and end at multiples of it."""

    def needed_to_cache_more(self, cached: int) -> int:
        """Length from which on a prompt can have more than these `cached` tokens in the cache."""

    def namespace(self, asked: Namespace) -> Namespace:
        """The namespace as the cache keeps it and as requests sent with it carry it."""

    def root(self) -> object:
        """Identity of the tree's content: changes with a reset."""

    def find(self, tokens: Sequence[int], namespace: Namespace) -> Any | None:
        """Handle of the node that ends where the cached part of the tokens ends, after a split if necessary.

        None if nothing is cached.
        """

    def path(self, handle: Any) -> list[NodeSpan]:
        """The nodes from below the root to this one; empty if it is gone."""

    def moved(self, ids: Sequence[int], handles: Sequence[Any], parent_id: int) -> list[list[NodeSpan]]:
        """Paths of those nodes whose parent is no longer `parent_id` (ROOT: a root)."""

    def alive(self, handle: Any) -> bool:
        """Whether the node is still in the tree."""

    def in_use(self, handle: Any) -> bool:
        """Whether a lock is held on the node."""

    def lock(self, handle: Any) -> NodeLock:
        """Keeps the node and all nodes above it from being evicted, until the lock is released."""

    def release(self, lock: NodeLock) -> None:
        """Releases a lock, once."""

    def evict(self, handle: Any) -> int:
        """Evicts the node if it is an unlocked leaf; returns how many tokens that freed."""


class _Tree:
    """Common to all generations."""

    name = ""
    can_evict = True

    def __init__(self, tree: Any, reader: TreeReader) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self._tree = tree
        self._reader = reader
        self._match_params = MatchPrefixParams
        self._evict_params = EvictParams
        self._radix_key = RadixKey
        self._takes_salt = "cache_salt" in inspect.signature(RadixKey).parameters
        # With EAGLE, nodes hold pairs of neighbours: one fewer than there are tokens.
        self._pairs = bool(getattr(getattr(tree, "tree_core", tree), "is_eagle", False))

    @property
    def page_size(self) -> int:
        return int(self._tree.page_size)

    def needed_to_cache_more(self, cached: int) -> int:
        return cached + self.page_size + self._pairs

    def namespace(self, asked: Namespace) -> Namespace:
        if self._takes_salt or asked.cache_salt is None:
            return asked
        # SGLang up to 0.5.17 joins both in this order when a request arrives.
        return Namespace(asked.cache_salt + (asked.extra_key or ""))

    def root(self) -> object:
        return self._reader.root()

    def find(self, tokens: Sequence[int], namespace: Namespace) -> Any | None:
        ids = tokens if isinstance(tokens, array) else array("q", tokens)
        salt = {} if namespace.cache_salt is None else {"cache_salt": namespace.cache_salt}
        key = self._radix_key(ids, namespace.extra_key, **salt)
        handle = self._tree.match_prefix(self._match_params(key=key)).last_device_node
        return handle if self.path(handle) else None

    def path(self, handle: Any) -> list[NodeSpan]:
        raise NotImplementedError


class ObjectTree(_Tree):
    """`RadixCache`: nodes are objects, a lock is a count on each node of the path."""

    name = "lock counts of node objects"

    def __init__(self, tree: Any, reader: TreeReader) -> None:
        # Streaming sessions wrap the cache. `evict` sets an attribute, which has to reach the cache itself.
        while "evictable_leaves" not in vars(tree) and hasattr(tree, "inner"):
            tree = tree.inner
        super().__init__(tree, reader)

    def path(self, handle: Any) -> list[NodeSpan]:
        chain = []
        node = handle
        while node.parent is not None:
            chain.append(node)
            node = node.parent
        result, begin = [], 0
        for node in reversed(chain):
            end = begin + len(node.key)
            result.append(NodeSpan(node, node.id, begin, end, not node.children))
            begin = end
        return result

    def moved(self, ids: Sequence[int], handles: Sequence[Any], parent_id: int) -> list[list[NodeSpan]]:
        return [self.path(node) for node in handles if _parent_id(node) != parent_id]

    def alive(self, handle: Any) -> bool:
        # Only unlocked leaves are deleted, and unlocked leaves are listed.
        return handle.lock_ref > 0 or bool(handle.children) or handle in self._tree.evictable_leaves

    def in_use(self, handle: Any) -> bool:
        return handle.lock_ref > 0

    def lock(self, handle: Any) -> NodeLock:
        self._tree.inc_lock_ref(handle)
        return NodeLock(handle, None)

    def release(self, lock: NodeLock) -> None:
        self._tree.dec_lock_ref(lock.handle)

    def evict(self, handle: Any) -> int:
        leaves = self._tree.evictable_leaves
        if handle not in leaves:
            return 0
        tokens = len(handle.key)
        # SGLang's own eviction, over this leaf only: it would read all leaves otherwise.
        self._tree.evictable_leaves = {handle}
        try:
            self._tree.evict(self._evict_params(num_tokens=tokens))
        finally:
            leaves.discard(handle)
            leaves |= self._tree.evictable_leaves  # the parent, if it has become a leaf
            self._tree.evictable_leaves = leaves
        return 0 if handle in leaves else tokens


class ReceiptTree(_Tree):
    """`UnifiedRadixCache` up to 0.5.21: nodes are numbers, a lock is released with the receipt that it returned."""

    name = "lock receipts of node numbers"

    def __init__(self, tree: Any, reader: TreeReader) -> None:
        super().__init__(tree, reader)
        # A native core names neither its leaves nor their locks.
        self._is_native = not hasattr(tree.tree_core, "evictable_device_leaves")
        if tree.is_write_back:
            self._cannot_evict("with hierarchical caching that writes back, an eviction needs a copy to the host")

    def path(self, handle: Any) -> list[NodeSpan]:
        (path,) = self._reader.paths([handle])
        return _spans(path or ())

    def moved(self, ids: Sequence[int], handles: Sequence[Any], parent_id: int) -> list[list[NodeSpan]]:
        return [_spans(path) for path in self._reader.paths(ids) if path and _parent_on(path) != parent_id]

    def alive(self, handle: Any) -> bool:
        return bool(self.path(handle))

    def in_use(self, handle: Any) -> bool:
        if not self._is_native:
            try:
                return any(data.lock_ref > 0 for data in self._tree.tree_core.node_by_id(handle).component_data)
            except KeyError:  # it is gone
                return False
        return self.alive(handle) and self._is_locked(handle)

    def _is_locked(self, handle: Any) -> bool:
        # A lock on a locked node locks no tokens that were unlocked before.
        result = self._tree.inc_lock_ref(handle)
        self._tree.dec_lock_ref(handle, result.to_dec_params())
        return not result.delta

    def lock(self, handle: Any) -> NodeLock:
        return NodeLock(handle, self._tree.inc_lock_ref(handle).to_dec_params())

    def release(self, lock: NodeLock) -> None:
        self._tree.dec_lock_ref(lock.handle, lock.receipt)

    def evict(self, handle: Any) -> int:
        # The native core cannot be used any more after an eviction of a node that is no unlocked leaf.
        if not self.can_evict or not self._is_unlocked_leaf(handle):
            return 0
        started, freed = time.perf_counter(), defaultdict[Any, int](int)
        self._tree._evict_device_leaf(handle, freed)
        tokens = max(freed.values(), default=0)
        self._tree.update_eviction_metrics(tokens, started)
        return tokens

    def _is_unlocked_leaf(self, handle: Any) -> bool:
        core = self._tree.tree_core
        if not self._is_native:
            try:
                return core.node_by_id(handle) in core.evictable_device_leaves
            except KeyError:
                return False
        try:
            node = core.collect_path_info([handle])[0][-1]
        except (KeyError, IndexError):
            return False
        children = getattr(node, "num_children", None)
        if children is None:
            self._cannot_evict("the native tree of this SGLang release does not count the children of a node")
            return False
        return children == 0 and node.full_value_len is not None and not self._is_locked(handle)

    def _cannot_evict(self, reason: str) -> None:
        self.can_evict = False
        logger.warning("prefixpack: retention is off, SGLang's eviction order holds: %s", reason)


class TreeLockTree(ReceiptTree):
    """`UnifiedRadixCache` from 0.5.22 on: it returns a lock object."""

    name = "tree locks"

    def lock(self, handle: Any) -> NodeLock:
        return NodeLock(handle, self._tree.lock(handle))

    def release(self, lock: NodeLock) -> None:
        self._tree.unlock(lock.receipt)


def lockable_tree(tree: Any) -> LockableTree | Refused:
    """The adapter for a prefix cache object, or the reason why there is none."""
    reader = reader_for(tree)
    if isinstance(reader, Refused):
        return reader
    for feature in ("supports_swa", "supports_mamba"):
        if hasattr(tree, feature) and getattr(tree, feature)():
            return Refused(
                UNKNOWN_TREE, f"{type(tree).__name__} keeps more than one kind of state per node ({feature})"
            )
    if not hasattr(tree, "tree_core"):
        return ObjectTree(tree, reader)
    if hasattr(tree, "lock") and hasattr(tree, "unlock"):
        return TreeLockTree(tree, reader)
    return ReceiptTree(tree, reader)


def _spans(path: Sequence[PathNode]) -> list[NodeSpan]:
    return [NodeSpan(node.id, node.id, node.begin, node.end, node.leaf) for node in path]


def _parent_on(path: Sequence[PathNode]) -> int:
    return path[-2].id if len(path) > 1 else ROOT


def _parent_id(node: Any) -> int:
    parent = node.parent
    return ROOT if parent is None or parent.parent is None else int(parent.id)
