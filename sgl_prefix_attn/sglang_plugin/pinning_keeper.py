"""Keeps prefixes in one prefix cache: pins that users made, and the order in which the rest is evicted.

Pins are locks that stay. Retention is a lock for the length of one eviction: what is worth more than what has to go is
locked, SGLang evicts from the rest, and the locks are released. So SGLang's admission sees everything that retention
keeps as evictable, which it is, and cannot be starved by it. Pins can starve it, so they give way: before an
allocation fails, and when nothing runs and the next request does not fit.

Reads nothing but requests, tree and pool, and counts time in scheduler steps and requests: all ranks decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sgl_prefix_attn.offline.queue_order import SharedPrefix
from sgl_prefix_attn.pinning import (
    CachedNode,
    CachedTree,
    Lookahead,
    Pin,
    PinLedger,
    PrefixWorth,
    ReuseMemory,
    Stretch,
)
from sgl_prefix_attn.pinning import prefix_keys as keys_of
from sgl_prefix_attn.sglang_plugin.pinning_counters import PinningCounters
from sgl_prefix_attn.sglang_plugin.pinning_groups import OfflinePrefixes
from sgl_prefix_attn.sglang_plugin.pinning_locks import PLAIN, LockableTree, Namespace, NodeLock

logger = logging.getLogger(__name__)

_QUANTA = 256  # parts of the pool: evictions are at least one, and nodes are not split for less


@dataclass
class _Held:
    """The lock of a pin, and how much of the pin it covers; none while nothing of the pin is cached."""

    namespace: Namespace
    lock: NodeLock | None = None
    tokens: int = 0


class _Prompt(NamedTuple):
    """What a cached node was computed for."""

    keys: Sequence[int]
    tokens: Sequence[int]
    namespace: Namespace


class CacheKeeper:
    """Pins and retention for one prefix cache.

    Args:
        tree: the cache's adapter.
        cache: the cache itself: its `evictable_size`, and its allocator's `available_size`.
        budget: tokens that may be pinned.
        retention: whether to choose what is evicted; else SGLang's order holds.
        lookahead: waiting requests that retention looks at.
        block: tokens per unit of what retention remembers.
    """

    def __init__(
        self, tree: LockableTree, cache: Any, *, budget: int, retention: bool, lookahead: int = 1024, block: int = 64
    ) -> None:
        self.counters = PinningCounters()
        self.retention = retention
        self.ledger = PinLedger(budget)
        self.worth = PrefixWorth(ReuseMemory() if retention else None, Lookahead(lookahead))
        self._tree = tree
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._block = block
        self._cached = CachedTree(block)
        self._held: dict[int, _Held] = {}
        self.offline = OfflinePrefixes(self.announce_shared)
        self._root = tree.root()
        self._avoided: dict[int, int] = {}  # node -> its last use when its eviction was last avoided

    # Pins -------------------------------------------------------------------------------------------------------------

    def pin(
        self,
        tokens: Sequence[int],
        namespace: Namespace = PLAIN,
        *,
        label: str = "",
        ttl_steps: int | None = None,
    ) -> Pin:
        """Pins a prefix: what is cached of it at once, the rest as soon as some request has computed it.

        The same prefix, namespace and label again renews the pin.

        Raises:
            ValueError, PinBudgetError: as PinLedger.add. Whatever the cache raises goes on, and no pin stays behind.
        """
        self._check_root()
        namespace = self._tree.namespace(namespace)
        pin = self.ledger.add(tokens, namespace=namespace.text, label=label, ttl_steps=ttl_steps)
        if pin.id in self._held:
            if self._held[pin.id].tokens < len(pin.tokens):
                self._lock_pin(pin)
            self._count_pins()
            return pin
        self._held[pin.id] = _Held(namespace)
        try:
            self._lock_pin(pin)
        except BaseException:
            # Nobody would know its number, and it would count against the budget for good.
            self.ledger.release(pin.id)
            self._unlock_pin(self._held.pop(pin.id))
            raise
        self.counters.pins_made += 1
        self._count_pins()
        return pin

    def release(self, pin_id: int) -> Pin:
        """Ends a pin. Raises UnknownPinError if there is none with this number."""
        self._check_root()
        pin = self.ledger.release(pin_id)
        self._unlock_pin(self._held.pop(pin.id))
        self.counters.pins_released += 1
        self._count_pins()
        return pin

    def pins_of(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> list[Pin]:
        """The pins of exactly this prefix."""
        wanted, text = tuple(tokens), self._tree.namespace(namespace).text
        return [pin for pin in self.ledger.pins() if pin.tokens == wanted and pin.namespace == text]

    def held_tokens(self, pin_id: int) -> int:
        """How much of a pin is cached, and so held."""
        return self._held[pin_id].tokens

    def step(self) -> None:
        """A scheduler step was run: pins whose time is over end."""
        self._check_root()
        for pin in self.ledger.advance():
            self._unlock_pin(self._held.pop(pin.id))
            self.counters.pins_expired += 1
            self._count_pins()

    def announce(self, tokens: Sequence[int], uses: int, namespace: Namespace = PLAIN) -> None:
        """So many requests of a group that share this prefix are still to come. ValueError: retention is off."""
        if not self.retention:
            raise ValueError("retention is off: set PREFIXPACK_RETENTION=reuse")
        self.worth.announce(keys_of(tokens, self._block, self._tree.namespace(namespace).text), uses)

    def announce_shared(self, request: Any, shared: SharedPrefix) -> None:
        """Announces a stretch of a request's prompt, without what lies before it."""
        # Not from the tokens: a prompt can have as many stretches as tokens, and each would hash all before it.
        keys = self._prompt_keys(request)[shared.begin // self._block : shared.end // self._block]
        self.worth.announce(keys, shared.uses)

    # What happens in the scheduler ------------------------------------------------------------------------------------

    def queue(self, waiting: Iterable[Any]) -> None:
        """The waiting queue as it is now, in the order in which it will be served."""
        if self.retention:
            self._check_root()
            requests = {request.rid: request for request in waiting}
            self.worth.lookahead.follow(list(requests), lambda rid: self._joined(requests[rid]))

    def admitted(self, request: Any, cached_tokens: int) -> None:
        """A request was admitted and found this much of its prompt in the cache."""
        if not self.retention:
            return
        if getattr(request, _COUNTED, False):  # it was retracted and comes back: that is no use of its own
            self.worth.lookahead.remove(request.rid)
            return
        setattr(request, _COUNTED, True)
        keys = self._prompt_keys(request)
        assert self.worth.memory is not None
        known = self.worth.memory.known_prefix(keys) * self._block
        self.counters.recomputed_tokens += max(0, known - cached_tokens)
        self.worth.scheduled(request.rid, keys)

    def left_behind(self, request: Any) -> None:
        """A request has gone: what it computed is in the cache, unlocked."""
        self._check_root()
        tokens = request.origin_input_ids + request.output_ids
        namespace = Namespace.of_request(request)
        for pin in self.ledger.pins():
            held = self._held[pin.id]
            if held.tokens < len(pin.tokens) and held.namespace == namespace:
                upto = held.tokens + 1
                # The last one first: most requests have nothing to do with most pins, and need no copy for each.
                if (
                    len(tokens) >= upto
                    and pin.tokens[upto - 1] == tokens[upto - 1]
                    and pin.tokens[:upto] == tuple(tokens[:upto])
                ):
                    self._lock_pin(pin)
        if self.retention:
            keys = self._prompt_keys(request)
            if request.output_ids:
                keys = keys_of(tokens, self._block, namespace.text)
            prompt = _Prompt(keys, tokens, namespace)
            handle = self._tree.find(tokens, namespace)
            if handle is not None:
                path = self._tree.path(handle)
                self._settle(self._cached.used(path, keys, prompt))
                self._split_where_worth_ends(prompt, path)

    def flushed(self) -> None:
        """The tree was thrown away: its locks are gone with it, and so are the pins."""
        self.ledger.clear()
        self._held.clear()
        self._cached.clear()
        self._avoided.clear()
        self.worth.clear()
        self._root = self._tree.root()
        self._count_pins()

    # Room -------------------------------------------------------------------------------------------------------------

    def missing(self, tokens: int) -> int:
        """Tokens that are neither free nor evictable, of those asked for."""
        return int(tokens - self._allocator.available_size() - self._cache.evictable_size())

    def make_room(self, tokens: int) -> bool:
        """Sheds pins until so many tokens are free or evictable; whether they are.

        Only pins whose end helps are shed: not what is not cached yet, and not what running requests hold as well.
        """
        self._check_root()
        if self.missing(tokens) <= 0:
            return True
        let_go: list[tuple[Pin, Any, int]] = []  # the pin, the node it held, and how much that was
        for pin in self.ledger.shed_order(self._worth_of_pin):
            held = self._held[pin.id]
            if held.lock is None:
                continue
            let_go.append((pin, held.lock.handle, held.tokens))
            self._unlock_pin(held)
            if self.missing(tokens) <= 0:
                break
        # Only now, because two pins of the same nodes free them together, and neither does so alone. What should stay
        # longest is taken back first.
        target = max(0, self.missing(tokens))
        for pin, handle, cached in reversed(let_go):
            self._take_back(pin, handle, cached, lambda: self.missing(tokens) - target)
        self._count_pins()
        return target <= 0

    def _take_back(self, pin: Pin, handle: Any, cached: int, excess: Callable[[], int]) -> None:
        """Locks what a pin held again, or the longest beginning found of it that leaves no `excess`; else it ends."""
        held = self._held[pin.id]
        held.lock, held.tokens = self._tree.lock(handle), cached
        over, cut = excess(), 0
        while over > 0:
            self._unlock_pin(held)
            # What is cut may be held by others too and so free less than its length; twice as much soon does not.
            cut += max(over, cut)
            if cut >= cached:
                break
            self._lock_pin(replace(pin, tokens=pin.tokens[: cached - cut]))
            over = excess()
        if held.tokens == cached:
            return
        self.counters.pins_shed += 1
        self.counters.tokens_shed += len(pin.tokens) - held.tokens
        self.ledger.shed(pin.id, held.tokens)
        if held.lock is None:
            del self._held[pin.id]

    @contextmanager
    def protected(self, tokens: int) -> Iterator[None]:
        """While inside, an eviction that frees `tokens` takes what is worth least. Never raises by itself."""
        locks: list[NodeLock] = []
        try:
            try:
                self._check_root()
                short = tokens - self._allocator.available_size()
                if short > 0:
                    self.make_room(tokens)
                    if self.retention:
                        self._protect(short, locks)
            except Exception:  # a guard of the hooks: the eviction runs in SGLang's order
                self.counters.failed()
            yield
        finally:
            self._release_all(locks)

    def _protect(self, tokens: int, locks: list[NodeLock]) -> None:
        """Locks everything but what is to go: whatever SGLang's order is, it evicts that."""
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
        locks += [self._tree.lock(node.handle) for node in order]
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
                self.counters.evictions_avoided += node.tokens

    def _release_all(self, locks: list[NodeLock]) -> None:
        while locks:
            lock = locks.pop()
            try:
                self._tree.release(lock)
            except Exception:  # a guard of the hooks: the other locks have to be released
                self.counters.failed()

    # Details ----------------------------------------------------------------------------------------------------------

    def _in_use(self, node: CachedNode) -> bool:
        return self._tree.in_use(node.handle)

    def _check_root(self) -> None:
        root = self._tree.root()
        if root is not self._root and root != self._root:
            self.flushed()

    def _lock_pin(self, pin: Pin) -> None:
        """Locks what is cached of a pin, in place of what it held."""
        held = self._held[pin.id]
        handle = self._tree.find(pin.tokens, held.namespace)
        if handle is None:
            return
        # In this order, so that whatever raises, every lock that is held is known.
        end = self._tree.path(handle)[-1].end
        lock = self._tree.lock(handle)
        before, held.lock, held.tokens = held.lock, lock, end
        if before is not None:
            self._tree.release(before)

    def _unlock_pin(self, held: _Held) -> None:
        if held.lock is not None:
            lock, held.lock = held.lock, None
            self._tree.release(lock)
        held.tokens = 0

    def _worth_of_pin(self, pin: Pin) -> float:
        if not self.retention:  # nothing is known of any
            return 0.0
        keys = keys_of(pin.tokens, self._block, pin.namespace)
        return self.worth.of(keys[-1]) if keys else 0.0

    def _count_pins(self) -> None:
        self.counters.pinned_tokens = self.ledger.pinned_tokens
        self.counters.pins = len(self.ledger)

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
        memory, next_use = self.worth.memory, self.worth.lookahead.next_use
        assert memory is not None
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
