"""Pins of one prefix cache: persistent locks on the cached part of each pinned prefix.

Pins can starve SGLang's admission, so they are shed when tokens are missing: the lowest retention score first, and of a
pin no more than is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_prefix_attn.pinning import Pin, PinLedger
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import PLAIN, LockableTree, Namespace, NodeLock


@dataclass
class _PinLock:
    """Lock of a pin; None while nothing of the pin is cached. `tokens` is the part of the pin that it covers."""

    namespace: Namespace
    lock: NodeLock | None = None
    tokens: int = 0


class PinLocks:
    """The ledger's pins and the lock of each.

    Args:
        tree: the cache's adapter.
        cache: the cache itself: its `evictable_size`, and its allocator's `available_size`.
        budget: tokens that may be pinned.
        counters: counts pins.
    """

    def __init__(self, tree: LockableTree, cache: Any, budget: int, counters: PinningCounters) -> None:
        self.ledger = PinLedger(budget)
        self._tree = tree
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._counters = counters
        self._locks: dict[int, _PinLock] = {}

    def __len__(self) -> int:
        return len(self.ledger)

    def pin(
        self,
        tokens: Sequence[int],
        namespace: Namespace = PLAIN,
        *,
        label: str = "",
        ttl_steps: int | None = None,
    ) -> Pin:
        """As `PinningManager.pin`."""
        namespace = self._tree.namespace(namespace)
        pin = self.ledger.add(tokens, namespace=namespace.text, label=label, ttl_steps=ttl_steps)
        if pin.id in self._locks:
            if self._locks[pin.id].tokens < len(pin.tokens):
                self._acquire(pin)
            self._count()
            return pin
        self._locks[pin.id] = _PinLock(namespace)
        try:
            self._acquire(pin)
        except BaseException:
            # The caller gets no id to release it with.
            self.ledger.release(pin.id)
            self._release(self._locks.pop(pin.id))
            raise
        self._counters.pins_made += 1
        self._count()
        return pin

    def release(self, pin_id: int) -> Pin:
        """As `PinningManager.release`."""
        pin = self.ledger.release(pin_id)
        self._release(self._locks.pop(pin.id))
        self._counters.pins_released += 1
        self._count()
        return pin

    def of(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> list[Pin]:
        """The pins that were made with exactly this prefix, also those shortened since."""
        return self.ledger.of(tokens, self._tree.namespace(namespace).text)

    def locked_tokens(self, pin_id: int) -> int:
        """Tokens of a pin that are cached and locked."""
        return self._locks[pin_id].tokens

    def step(self) -> None:
        """A scheduler step ended: expired pins end."""
        for pin in self.ledger.advance():
            self._release(self._locks.pop(pin.id))
            self._counters.pins_expired += 1
            self._count()

    def computed(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """These tokens are cached now: pins that share more of them than is locked lock that."""
        for pin in self.ledger.pins():
            entry = self._locks[pin.id]
            if entry.tokens < len(pin.tokens) and entry.namespace == namespace:
                end = self._tree.needed_to_cache_more(entry.tokens)
                # The last token is compared first: most requests share nothing with most pins.
                if (
                    min(len(pin.tokens), len(tokens)) >= end
                    and pin.tokens[end - 1] == tokens[end - 1]
                    and pin.tokens[:end] == tuple(tokens[:end])
                ):
                    self._acquire(pin)

    def clear(self) -> None:
        """The tree was reset, its locks with it: no pin is left."""
        self.ledger.clear()
        self._locks.clear()
        self._count()

    # Room -------------------------------------------------------------------------------------------------------------

    def missing(self, tokens: int) -> int:
        """How many of these tokens are neither free nor evictable."""
        return int(tokens - self._allocator.available_size() - self._cache.evictable_size())

    def make_room(self, tokens: int, score: Callable[[Pin], float]) -> bool:
        """Sheds pins, the lowest score first, until so many tokens are free or evictable; returns whether they are.

        Only pins whose end frees tokens are shed: not those that are not cached yet or that running requests use.
        """
        if self.missing(tokens) <= 0:
            return True
        released: list[tuple[Pin, Any, int]] = []  # pin, node it locked, tokens locked
        for pin in self.ledger.shed_order(score):
            entry = self._locks[pin.id]
            if entry.lock is None:
                continue
            released.append((pin, entry.lock.handle, entry.tokens))
            self._release(entry)
            if self.missing(tokens) <= 0:
                break
        # Locks are taken back only now, because two pins of the same nodes free them together and neither alone.
        # The pin that should be shed last is taken back first.
        target = max(0, self.missing(tokens))
        for pin, handle, cached in reversed(released):
            self._take_back(pin, handle, cached, lambda: self.missing(tokens) - target)
        self._count()
        return target <= 0

    def _take_back(self, pin: Pin, handle: Any, cached: int, excess: Callable[[], int]) -> None:
        """Locks a pin's nodes again, or the longest beginning found that leaves no `excess`; otherwise the pin ends."""
        entry = self._locks[pin.id]
        entry.lock, entry.tokens = self._tree.lock(handle), cached
        over, cut = excess(), 0
        while over > 0:
            self._release(entry)
            # Others may lock the part that is cut off too, so that it frees less than its length; doubling ends soon.
            cut += max(over, cut)
            if cut >= cached:
                break
            self._acquire(replace(pin, tokens=pin.tokens[: cached - cut]))
            over = excess()
        if entry.tokens == cached:
            return
        self._counters.pins_shed += 1
        self._counters.tokens_shed += len(pin.tokens) - entry.tokens
        self.ledger.shed(pin.id, entry.tokens)
        if entry.lock is None:
            del self._locks[pin.id]

    # Details ----------------------------------------------------------------------------------------------------------

    def _acquire(self, pin: Pin) -> None:
        """Locks the cached part of a pin in place of what its lock covered."""
        entry = self._locks[pin.id]
        handle = self._tree.find(pin.tokens, entry.namespace)
        if handle is None:
            return
        # In this order no lock is lost if a call raises.
        end = self._tree.path(handle)[-1].end
        lock = self._tree.lock(handle)
        before, entry.lock, entry.tokens = entry.lock, lock, end
        if before is not None:
            self._tree.release(before)

    def _release(self, entry: _PinLock) -> None:
        if entry.lock is not None:
            lock, entry.lock = entry.lock, None
            self._tree.release(lock)
        entry.tokens = 0

    def _count(self) -> None:
        self._counters.pinned_tokens = self.ledger.pinned_tokens
        self._counters.pins = len(self.ledger)
