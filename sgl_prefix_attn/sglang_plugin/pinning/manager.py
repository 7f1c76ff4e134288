"""Manages one prefix cache: pins that users made, and the order in which the rest is evicted.

All inputs are requests, tree and pool; time is counted in scheduler steps and requests. So all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from sgl_prefix_attn.pinning import Pin
from sgl_prefix_attn.sglang_plugin.pinning.eviction_policy import Retention
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters
from sgl_prefix_attn.sglang_plugin.pinning.pin_locks import PinLocks
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import PLAIN, LockableTree, Namespace
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Guard

_ANNOUNCING = 4096  # waiting requests of which each pass looks for shared prefixes of offline jobs


class PinningManager:
    """Pins and retention of one prefix cache.

    Args:
        tree: the cache's adapter.
        cache: the cache itself: its `evictable_size`, and its allocator's `available_size` and `size`.
        budget: tokens that may be pinned.
        retention: whether retention chooses what is evicted; otherwise SGLang's order holds, until `listen`.
        remember: whether past use counts for retention.
        hint_tokens: tokens that hints may keep.
        jobs: whether requests may announce the shared prefixes of their offline job to retention.
        lookahead: waiting requests that retention counts.
        block: tokens per prefix key of retention.

    Attributes:
        pins: the pins and their locks.
        retention: None if SGLang's eviction order holds.
        counters: counters of both.
    """

    def __init__(
        self,
        tree: LockableTree,
        cache: Any,
        *,
        budget: int,
        retention: bool,
        remember: bool = True,
        hint_tokens: int = 0,
        jobs: bool = False,
        lookahead: int = 1024,
        block: int = 64,
    ) -> None:
        self.counters = PinningCounters()
        self.pins = PinLocks(tree, cache, budget, self.counters)
        self._make_retention = lambda: Retention(
            tree, cache, lookahead, block, self.counters, remember=remember, hint_tokens=hint_tokens
        )
        self.retention = self._make_retention() if retention else None
        self._jobs = jobs
        self._tree = tree
        self._allocator = cache.token_to_kv_pool_allocator
        self._root = tree.root()

    def listen(self) -> None:
        """From now on retention reads hints and sessions. It starts now if it was off."""
        if self.retention is None:
            self.retention = self._make_retention()
        self.retention.listens = True

    # Pins -------------------------------------------------------------------------------------------------------------

    def pin(
        self,
        tokens: Sequence[int],
        namespace: Namespace = PLAIN,
        *,
        label: str = "",
        ttl_steps: int | None = None,
    ) -> Pin:
        """Pins a prefix: its cached part at once, the rest as soon as a request has computed it.

        The same prefix, namespace and label again renews the pin.

        Raises:
            ValueError, PinBudgetError: as PinLedger.add. If the cache raises, no new pin is left behind.
        """
        self._check_root()
        return self.pins.pin(tokens, namespace, label=label, ttl_steps=ttl_steps)

    def release(self, pin_id: int) -> Pin:
        """Ends a pin. Raises UnknownPinError if there is none with this id."""
        self._check_root()
        return self.pins.release(pin_id)

    # Events of the scheduler ------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A scheduler step ended."""
        self._check_root()
        self.pins.step()

    def on_queue(self, waiting: Iterable[Any]) -> None:
        """The waiting queue, in the order in which it will be served."""
        if self.retention is not None:
            self._check_root()
            if self._jobs:
                self.retention.offline.arrived(islice(waiting, _ANNOUNCING))
            self.retention.queue(waiting)

    def admitted(self, request: Any, cached_tokens: int) -> None:
        """A request was admitted and found `cached_tokens` of its prompt in the cache."""
        if self.retention is not None:
            self.retention.admitted(request, cached_tokens)

    def on_request_released(self, request: Any) -> None:
        """A request has ended; its tokens are cached and unlocked."""
        self._check_root()
        tokens = request.origin_input_ids + request.output_ids
        namespace = Namespace.of_request(request)
        self.pins.computed(tokens, namespace)
        if self.retention is not None:
            self.retention.on_request_released(request, tokens, namespace)

    def flushed(self) -> None:
        """The tree was reset: its locks are gone, and so are the pins."""
        self.pins.clear()
        if self.retention is not None:
            self.retention.clear()
        self._root = self._tree.root()

    def close_session(self, session: str) -> None:
        """A session is over, see `Retention.close_session`."""
        if self.retention is not None:
            self._check_root()
            self.retention.close_session(session)

    # Room -------------------------------------------------------------------------------------------------------------

    def make_room(self, tokens: int) -> bool:
        """Sheds pins until so many tokens are free or evictable; returns whether they are."""
        self._check_root()
        return self.pins.make_room(tokens, _equal_score if self.retention is None else self.retention.score_of_pin)

    def make_room_for(self, request: Any, tokens: int) -> bool:
        """As `make_room`, for all tokens of a request; the cached prefix that it will use stays pinned."""
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

    def before_allocation(self, tokens: int) -> None:
        """Sheds pins and evicts, so that an allocation of so many tokens finds them free. Never raises."""
        with Guard(self.counters, "pins.evict", "SGLang evicts in its own order"):
            missing = tokens - self._allocator.available_size()
            if missing > 0:
                self._check_root()
                self.make_room(tokens)
                if self.retention is not None:
                    self.retention.evict(missing)

    def _check_root(self) -> None:
        root = self._tree.root()
        if root is not self._root and root != self._root:
            self.flushed()


def _equal_score(pin: Pin) -> float:
    return 0.0
