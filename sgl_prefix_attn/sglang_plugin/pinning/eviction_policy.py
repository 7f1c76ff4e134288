"""Chooses what one prefix cache evicts: what is worth least is to go first.

Retention is a lock for the length of one eviction: what is worth more than what has to go is locked, SGLang evicts from
the rest, and the locks are released. So SGLang's admission sees everything that retention keeps as evictable, which it
is, and cannot be starved by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sgl_prefix_attn.offline.queue_order import SharedPrefix
from sgl_prefix_attn.pinning import CachedNode, CachedTree, Lookahead, Pin, PrefixWorth, ReuseMemory, Stretch
from sgl_prefix_attn.pinning import prefix_keys as keys_of
from sgl_prefix_attn.pinning.ledger import MAX_PINS
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters
from sgl_prefix_attn.sglang_plugin.pinning.offline_prefixes import OfflinePrefixes
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import LockableTree, Namespace, NodeLock

_QUANTA = 256  # parts of the pool: evictions are at least one, and nodes are not split for less


class _Prompt(NamedTuple):
    """What a cached node was computed for."""

    keys: Sequence[int]
    tokens: Sequence[int]
    namespace: Namespace


class Retention:
    """What is cached, what it is worth, and what of it to give up.

    Args:
        tree: the cache's adapter.
        cache: the cache itself: its `evictable_size`, and its allocator's `available_size` and `size`.
        lookahead: waiting requests that are looked at.
        block: tokens per unit of what is remembered.
        counters: evictions avoided and tokens recomputed are counted here.

    Attributes:
        worth: what prefixes are worth.
        offline: the shared prefixes of offline jobs.
    """

    def __init__(self, tree: LockableTree, cache: Any, lookahead: int, block: int, counters: PinningCounters) -> None:
        self._memory = ReuseMemory()
        self.worth = PrefixWorth(self._memory, Lookahead(lookahead))
        self._tree = tree
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._block = block
        self._counters = counters
        self._cached = CachedTree(block)
        self._avoided: dict[int, int] = {}  # node -> its last use when its eviction was last avoided
        # By pin, asked for longest ago first: length and last key. Pins are compared whenever room is missing.
        self._pin_keys: dict[int, tuple[int, int | None]] = {}
        self.offline = OfflinePrefixes(self.announce_shared)

    def announce(self, tokens: Sequence[int], uses: int, namespace: Namespace) -> None:
        """So many requests of a group that share this prefix are still to come."""
        self.worth.announce(keys_of(tokens, self._block, self._tree.namespace(namespace).text), uses)

    def announce_shared(self, request: Any, shared: SharedPrefix) -> None:
        """Announces a stretch of a request's prompt, without what lies before it."""
        # Not from the tokens: a prompt can have as many stretches as tokens, and each would hash all before it.
        keys = self._prompt_keys(request)[shared.begin // self._block : shared.end // self._block]
        self.worth.announce(keys, shared.uses)

    def queue(self, waiting: Iterable[Any]) -> None:
        """The waiting queue as it is now, in the order in which it will be served."""
        requests = {request.rid: request for request in waiting}
        self.worth.lookahead.follow(list(requests), lambda rid: self._joined(requests[rid]))

    def admitted(self, request: Any, cached_tokens: int) -> None:
        """A request was admitted and found this much of its prompt in the cache."""
        if getattr(request, _COUNTED, False):  # it was retracted and comes back: that is no use of its own
            self.worth.lookahead.remove(request.rid)
            return
        setattr(request, _COUNTED, True)
        keys = self._prompt_keys(request)
        known = self._memory.known_prefix(keys) * self._block
        self._counters.recomputed_tokens += max(0, known - cached_tokens)
        self.worth.scheduled(request.rid, keys)

    def left_behind(self, request: Any, tokens: Sequence[int], namespace: Namespace) -> None:
        """A request has gone: these tokens, its prompt first, are in the cache, unlocked."""
        keys = self._prompt_keys(request)
        if request.output_ids:
            keys = keys_of(tokens, self._block, namespace.text)
        prompt = _Prompt(keys, tokens, namespace)
        handle = self._tree.find(tokens, namespace)
        if handle is not None:
            path = self._tree.path(handle)
            self._settle(self._cached.used(path, keys, prompt))
            self._split_where_worth_ends(prompt, path)

    def clear(self) -> None:
        """The tree was thrown away."""
        self._cached.clear()
        self._avoided.clear()
        self.worth.clear()

    def worth_of_pin(self, pin: Pin) -> float:
        """Worth per token of the prefix that a pin keeps."""
        length, key = self._pin_keys.pop(pin.id, (0, None))
        if length != len(pin.tokens):
            keys = keys_of(pin.tokens, self._block, pin.namespace)
            length, key = len(pin.tokens), keys[-1] if keys else None
        self._pin_keys[pin.id] = length, key
        while len(self._pin_keys) > MAX_PINS:
            del self._pin_keys[next(iter(self._pin_keys))]
        return self.worth.of(key)

    def protect(self, tokens: int, locks: list[NodeLock]) -> None:
        """Locks everything but what is to go when `tokens` are missing: whatever SGLang's order is, it evicts that.

        Each lock is in `locks` as soon as it is held, whatever raises afterwards.
        """
        self._forget_evicted()
        # In decode little is asked for at a time, but step after step: several steps' worth goes at once.
        wanted = max(tokens, self._allocator.size // _QUANTA)
        chosen = self._cached.give_up(wanted, self.worth.of, self._in_use, spent=self.worth.any_spent)
        if not chosen:
            return
        going = {node.id for node in chosen}
        self._count_avoided(tokens, going)
        self._shorten(chosen[-1], sum(node.tokens for node in chosen) - wanted)
        staying: dict[int, CachedNode] = {}
        for node in self._cached.leaves():
            # Up to the first ancestor that stays: its children may all be going.
            while node.id in going:
                parent = self._cached.get(node.parent)
                if parent is None:
                    break
                node = parent
            else:
                if not self._in_use(node):
                    staying[node.id] = node
        order = sorted(staying.values(), key=lambda node: (-self.worth.of(self._cached.key(node)), -node.used, node.id))
        for node in order:
            locks.append(self._tree.lock(node.handle))
        while locks and self._cache.evictable_size() < tokens:
            self._tree.release(locks.pop())

    def _shorten(self, node: CachedNode, excess: int) -> None:
        """Splits a node that is to go, so that only its end does: SGLang evicts whole nodes."""
        if excess < max(1, self._allocator.size // _QUANTA) or node.prompt is None:
            return
        handle = self._tree.find(node.prompt.tokens[: node.begin + excess], node.prompt.namespace)
        if handle is not None:
            self._settle(self._cached.seen(self._tree.path(handle), node.keys, node.prompt))

    def _count_avoided(self, tokens: int, going: set[int]) -> None:
        for node in self._cached.give_up(tokens, lambda key: 0.0, self._in_use):
            if node.id not in going and self._avoided.get(node.id) != node.used:
                self._avoided[node.id] = node.used
                self._counters.evictions_avoided += node.tokens

    # Details ----------------------------------------------------------------------------------------------------------

    def _in_use(self, node: CachedNode) -> bool:
        return self._tree.in_use(node.handle)

    def _prompt_keys(self, request: Any) -> Sequence[int]:
        keys = getattr(request, _KEYS, None)
        if keys is None:
            keys = keys_of(request.origin_input_ids, self._block, Namespace.of_request(request).text)
            setattr(request, _KEYS, keys)
        return keys

    def _joined(self, request: Any) -> Sequence[int]:
        """A request joined the queue: splits off what of the cache it will use. Returns its keys."""
        keys = self._prompt_keys(request)
        namespace = Namespace.of_request(request)
        handle = self._tree.find(request.origin_input_ids, namespace)
        if handle is not None:
            prompt = _Prompt(keys, request.origin_input_ids, namespace)
            self._settle(self._cached.seen(self._tree.path(handle), keys, prompt))
        return keys

    def _split_where_worth_ends(self, prompt: _Prompt, path: Sequence[Stretch]) -> None:
        """Splits what a request left behind where it is worth less from there on.

        A node is kept or given up as a whole. The end of a prompt is often used by none of the waiting requests that
        use its beginning; its beginning may have been used before, and evicted since; and what does not fill a block
        is never worth anything.
        """
        bounds = {0, *(node.end for node in path)}
        for position in self._ends_of_worth(prompt):
            if position not in bounds:
                handle = self._tree.find(prompt.tokens[:position], prompt.namespace)
                if handle is not None:
                    self._settle(self._cached.seen(self._tree.path(handle), prompt.keys, prompt))

    def _ends_of_worth(self, prompt: _Prompt) -> Iterator[int]:
        memory, next_use = self._memory, self.worth.lookahead.next_use
        before = None
        for index, key in enumerate(prompt.keys):
            after = (memory.uses(key), next_use(key))
            if after != before:
                yield index * self._block
            before = after
        full = len(prompt.keys) * self._block
        if 2 * (len(prompt.tokens) - full) >= self._block:
            yield full

    def _settle(self, suspects: list[int]) -> None:
        """Finds out where splits have put nodes."""
        while suspects:
            by_parent: dict[int, list[int]] = {}
            for node_id in suspects:
                by_parent.setdefault(self._cached.parent_of(node_id), []).append(node_id)
            suspects = []
            for parent, ids in by_parent.items():
                nodes = [node for node in map(self._cached.get, ids) if node is not None]
                for path in self._tree.moved(ids, [node.handle for node in nodes], parent):
                    suspects += self._cached.place(path) if path else []

    def _forget_evicted(self) -> None:
        looked: set[int] = set()
        while True:
            gone = [
                node.id for node in self._cached.leaves() if node.id not in looked and not self._tree.alive(node.handle)
            ]
            looked.update(node.id for node in self._cached.leaves())
            for node_id in gone:
                self._cached.drop(node_id)
                self._avoided.pop(node_id, None)
            if not gone:
                return


_COUNTED = "_prefixpack_counted"
_KEYS = "_prefixpack_keys"
