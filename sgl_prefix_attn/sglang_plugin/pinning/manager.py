"""Keeps prefixes in one prefix cache: pins that users made, and the order in which the rest is evicted.

Reads nothing but requests, tree and pool, and counts time in scheduler steps and requests: all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sgl_prefix_attn.pinning import Pin
from sgl_prefix_attn.sglang_plugin.pinning.eviction_policy import Retention
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters
from sgl_prefix_attn.sglang_plugin.pinning.pin_locks import HeldPins
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import PLAIN, LockableTree, Namespace, NodeLock


class CacheKeeper:
    """Pins and retention for one prefix cache, told of all that happens to it.

    Args:
        tree: the cache's adapter.
        cache: the cache itself: its `evictable_size`, and its allocator's `available_size`.
        budget: tokens that may be pinned.
        retention: whether to choose what is evicted; else SGLang's order holds.
        lookahead: waiting requests that retention looks at.
        block: tokens per unit of what retention remembers.

    Attributes:
        pins: the pins and what each holds.
        retention: what chooses, None if SGLang's order holds.
        counters: what both did.
    """

    def __init__(
        self, tree: LockableTree, cache: Any, *, budget: int, retention: bool, lookahead: int = 1024, block: int = 64
    ) -> None:
        self.counters = PinningCounters()
        self.pins = HeldPins(tree, cache, budget, self.counters)
        self.retention = Retention(tree, cache, lookahead, block, self.counters) if retention else None
        self._tree = tree
        self._allocator = cache.token_to_kv_pool_allocator
        self._root = tree.root()

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
            ValueError, PinBudgetError: as PinLedger.add. Whatever the cache raises goes on, and no new pin
            stays behind.
        """
        self._check_root()
        return self.pins.pin(tokens, namespace, label=label, ttl_steps=ttl_steps)

    def release(self, pin_id: int) -> Pin:
        """Ends a pin. Raises UnknownPinError if there is none with this number."""
        self._check_root()
        return self.pins.release(pin_id)

    def announce(self, tokens: Sequence[int], uses: int, namespace: Namespace = PLAIN) -> None:
        """So many requests of a group that share this prefix are still to come. ValueError: retention is off."""
        if self.retention is None:
            raise ValueError("retention is off: set PREFIXPACK_RETENTION=reuse")
        self._check_root()
        self.retention.announce(tokens, uses, namespace)

    # What happens in the scheduler ------------------------------------------------------------------------------------

    def step(self) -> None:
        """A scheduler step was run."""
        self._check_root()
        self.pins.step()

    def arrived(self, waiting: Iterable[Any]) -> None:
        """Requests of offline jobs that have not been seen before announce what they share."""
        if self.retention is not None:
            self._check_root()
            self.retention.offline.arrived(waiting)

    def queue(self, waiting: Iterable[Any]) -> None:
        """The waiting queue as it is now, in the order in which it will be served."""
        if self.retention is not None:
            self._check_root()
            self.retention.queue(waiting)

    def admitted(self, request: Any, cached_tokens: int) -> None:
        """A request was admitted and found this much of its prompt in the cache."""
        if self.retention is not None:
            self.retention.admitted(request, cached_tokens)

    def left_behind(self, request: Any) -> None:
        """A request has gone: what it computed is in the cache, unlocked."""
        self._check_root()
        tokens = request.origin_input_ids + request.output_ids
        namespace = Namespace.of_request(request)
        self.pins.computed(tokens, namespace)
        if self.retention is not None:
            self.retention.left_behind(request, tokens, namespace)

    def flushed(self) -> None:
        """The tree was thrown away: its locks are gone with it, and so are the pins."""
        self.pins.clear()
        if self.retention is not None:
            self.retention.clear()
        self._root = self._tree.root()

    # Room -------------------------------------------------------------------------------------------------------------

    def make_room(self, tokens: int) -> bool:
        """Sheds pins until so many tokens are free or evictable; whether they are."""
        self._check_root()
        return self.pins.make_room(tokens, _nothing_known if self.retention is None else self.retention.worth_of_pin)

    def make_room_for(self, request: Any, tokens: int) -> bool:
        """As `make_room`, for all tokens of a request; pins of what is cached of them stay, since it will use that."""
        self._check_root()
        known = request.origin_input_ids + request.output_ids
        # At least one token of a prompt is always computed.
        handle = self._tree.find(known[:-1], Namespace.of_request(request))
        if handle is None:
            return self.make_room(tokens)
        cached = self._tree.path(handle)[-1].end
        lock = self._tree.lock(handle)
        try:
            return self.make_room(tokens - cached)
        finally:
            self._tree.release(lock)

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
                    if self.retention is not None:
                        self.retention.protect(short, locks)
            except Exception:  # a guard of the hooks: the eviction runs in SGLang's order
                self.counters.failed()
            yield
        finally:
            self._release_all(locks)

    def _release_all(self, locks: list[NodeLock]) -> None:
        while locks:
            lock = locks.pop()
            try:
                self._tree.release(lock)
            except Exception:  # a guard of the hooks: the other locks have to be released
                self.counters.failed()

    def _check_root(self) -> None:
        root = self._tree.root()
        if root is not self._root and root != self._root:
            self.flushed()


def _nothing_known(pin: Pin) -> float:
    return 0.0
