"""Pins of one prefix cache: locks that stay, on what is cached of each pinned prefix.

Pins can starve SGLang's admission, so they give way: the ones that are worth least first, and of a pin no more than
what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_prefix_attn.pinning import Pin, PinLedger
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import PLAIN, LockableTree, Namespace, NodeLock


@dataclass
class _Held:
    """The lock of a pin, and how much of the pin it covers; none while nothing of the pin is cached."""

    namespace: Namespace
    lock: NodeLock | None = None
    tokens: int = 0


class HeldPins:
    """The ledger's pins, and the lock that each has.

    Args:
        tree: the cache's adapter.
        cache: the cache itself: its `evictable_size`, and its allocator's `available_size`.
        budget: tokens that may be pinned.
        counters: what happens to pins is counted here.
    """

    def __init__(self, tree: LockableTree, cache: Any, budget: int, counters: PinningCounters) -> None:
        self.ledger = PinLedger(budget)
        self._tree = tree
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._counters = counters
        self._held: dict[int, _Held] = {}

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
        """As `CacheKeeper.pin`."""
        namespace = self._tree.namespace(namespace)
        pin = self.ledger.add(tokens, namespace=namespace.text, label=label, ttl_steps=ttl_steps)
        if pin.id in self._held:
            if self._held[pin.id].tokens < len(pin.tokens):
                self._lock(pin)
            self._count()
            return pin
        self._held[pin.id] = _Held(namespace)
        try:
            self._lock(pin)
        except BaseException:
            # Nobody would know its number, and it would count against the budget for good.
            self.ledger.release(pin.id)
            self._unlock(self._held.pop(pin.id))
            raise
        self._counters.pins_made += 1
        self._count()
        return pin

    def release(self, pin_id: int) -> Pin:
        """As `CacheKeeper.release`."""
        pin = self.ledger.release(pin_id)
        self._unlock(self._held.pop(pin.id))
        self._counters.pins_released += 1
        self._count()
        return pin

    def of(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> list[Pin]:
        """The pins that were asked for with exactly this prefix; also those shortened since."""
        return self.ledger.of(tokens, self._tree.namespace(namespace).text)

    def held_tokens(self, pin_id: int) -> int:
        """How much of a pin is cached, and so held."""
        return self._held[pin_id].tokens

    def step(self) -> None:
        """A scheduler step was run: pins whose time is over end."""
        for pin in self.ledger.advance():
            self._unlock(self._held.pop(pin.id))
            self._counters.pins_expired += 1
            self._count()

    def computed(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """These tokens are cached now: pins of which they have more than is held hold it from now on."""
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
                    self._lock(pin)

    def clear(self) -> None:
        """The tree was thrown away, its locks with it: no pin is left."""
        self.ledger.clear()
        self._held.clear()
        self._count()

    # Room -------------------------------------------------------------------------------------------------------------

    def missing(self, tokens: int) -> int:
        """Tokens that are neither free nor evictable, of those asked for."""
        return int(tokens - self._allocator.available_size() - self._cache.evictable_size())

    def make_room(self, tokens: int, worth: Callable[[Pin], float]) -> bool:
        """Sheds pins, those of the least worth first, until so many tokens are free or evictable; whether they are.

        Only pins whose end helps are shed: not what is not cached yet, and not what running requests hold as well.
        """
        if self.missing(tokens) <= 0:
            return True
        let_go: list[tuple[Pin, Any, int]] = []  # the pin, the node it held, and how much that was
        for pin in self.ledger.shed_order(worth):
            held = self._held[pin.id]
            if held.lock is None:
                continue
            let_go.append((pin, held.lock.handle, held.tokens))
            self._unlock(held)
            if self.missing(tokens) <= 0:
                break
        # Only now, because two pins of the same nodes free them together, and neither does so alone. What should stay
        # longest is taken back first.
        target = max(0, self.missing(tokens))
        for pin, handle, cached in reversed(let_go):
            self._take_back(pin, handle, cached, lambda: self.missing(tokens) - target)
        self._count()
        return target <= 0

    def _take_back(self, pin: Pin, handle: Any, cached: int, excess: Callable[[], int]) -> None:
        """Locks what a pin held again, or the longest beginning found of it that leaves no `excess`; else it ends."""
        held = self._held[pin.id]
        held.lock, held.tokens = self._tree.lock(handle), cached
        over, cut = excess(), 0
        while over > 0:
            self._unlock(held)
            # What is cut may be held by others too and so free less than its length; twice as much soon does not.
            cut += max(over, cut)
            if cut >= cached:
                break
            self._lock(replace(pin, tokens=pin.tokens[: cached - cut]))
            over = excess()
        if held.tokens == cached:
            return
        self._counters.pins_shed += 1
        self._counters.tokens_shed += len(pin.tokens) - held.tokens
        self.ledger.shed(pin.id, held.tokens)
        if held.lock is None:
            del self._held[pin.id]

    # Details ----------------------------------------------------------------------------------------------------------

    def _lock(self, pin: Pin) -> None:
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

    def _unlock(self, held: _Held) -> None:
        if held.lock is not None:
            lock, held.lock = held.lock, None
            self._tree.release(lock)
        held.tokens = 0

    def _count(self) -> None:
        self._counters.pinned_tokens = self.ledger.pinned_tokens
        self._counters.pins = len(self.ledger)
