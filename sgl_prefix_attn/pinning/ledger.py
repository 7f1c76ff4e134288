"""Pins under a token budget."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from sgl_prefix_attn.pinning.errors import PinBudgetError, UnknownPinError

# Each pin stores its own tokens: pins of one prefix cost memory and time in every scheduler, but no budget.
MAX_PINS = 1024
MOST_STORED = 4  # times the budget, in tokens of all pins
BYTES_PER_TOKEN = 50  # what a pin stores for a token of its prefix


@dataclass(frozen=True)
class Pin:
    """A prefix that stays cached.

    Attributes:
        id: hash of the requested prefix, its namespace and its label: equal in all schedulers and runs, exact in JSON.
        tokens: its token ids.
        namespace: prefixes of different namespaces share nothing.
        label: chosen by the user.
        expires: scheduler step at which it ends, None: never.
    """

    id: int
    tokens: tuple[int, ...]
    namespace: str | None = None
    label: str = ""
    expires: int | None = None


class PinLedger:
    """Pins under a token budget. A prefix that several pins share counts once. A pin's namespace counts as tokens too.

    Deterministic: results depend on the calls only.

    Args:
        budget: tokens that may be pinned at a time.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"budget is {budget}: it has to be a number of tokens, 0 or more")
        self.budget = budget
        self.step = 0
        self._pins: dict[int, Pin] = {}
        self._sorted: list[tuple[bytes, int]] = []
        self._pinned = 0
        self._keys = 0
        self._stored = 0
        self._next_end: float = math.inf  # no pin ends before

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def pinned_tokens(self) -> int:
        """Distinct tokens that are pinned."""
        return self._pinned

    @property
    def used(self) -> int:
        """What counts against the budget: the pinned tokens, and the namespaces of all pins."""
        return self._pinned + self._keys

    def pins(self) -> list[Pin]:
        """All pins, oldest first."""
        return list(self._pins.values())

    def get(self, pin_id: int) -> Pin:
        """Raises UnknownPinError if there is no such pin."""
        try:
            return self._pins[pin_id]
        except KeyError:
            raise UnknownPinError(
                f"there is no pin {pin_id}: it was released, has expired, was shed, or never existed"
            ) from None

    def of(self, tokens: Sequence[int], namespace: str | None = None) -> list[Pin]:
        """The pins that were made with exactly this prefix, with any label; also those shortened since."""
        begun = [
            pin
            for pin in self._pins.values()
            if len(pin.tokens) <= len(tokens) and pin.tokens[-1] == tokens[len(pin.tokens) - 1]
        ]
        text = _text(tokens, namespace)
        ids = {_id(text, label) for label in {pin.label for pin in begun}}
        return [pin for pin in begun if pin.id in ids]

    def cost(self, tokens: Sequence[int], namespace: str | None = None) -> int:
        """Tokens that a pin of this prefix would add to those that are in use."""
        return self._uncovered(_text(tokens, namespace), len(tokens)) + _key_tokens(namespace)

    def add(
        self, tokens: Sequence[int], *, namespace: str | None = None, label: str = "", ttl_steps: int | None = None
    ) -> Pin:
        """Pins a prefix. A pin of this prefix, namespace and label is renewed: it gets the new expiry, and all its
        tokens if it was shortened.

        Raises:
            ValueError: there are no tokens, or ttl_steps is below 1.
            PinBudgetError: the budget does not allow it, or there are MAX_PINS pins, or they would store more than
                MOST_STORED times the budget.
        """
        if not tokens:
            raise ValueError("there are no tokens to pin")
        if ttl_steps is not None and ttl_steps < 1:
            raise ValueError(f"ttl_steps is {ttl_steps}: a pin lasts at least one scheduler step")
        if len(tokens) > self.budget:  # before anything is copied
            raise PinBudgetError(
                f"pinning {len(tokens)} tokens is not possible, because that is more than all of the budget of "
                f"{self.budget}; pin a shorter prefix or raise the budget"
            )
        text = _text(tokens, namespace)
        pin_id = _id(text, label)
        before = self._pins.get(pin_id)
        if before is None and len(self._pins) >= MAX_PINS:
            raise PinBudgetError(f"there are {MAX_PINS} pins, which is as many as there can be; release pins")
        stored = self._stored - (0 if before is None else len(before.tokens)) + len(tokens)
        if stored > MOST_STORED * self.budget:
            raise PinBudgetError(
                f"all pins together may have {MOST_STORED * self.budget} tokens, each pin with its own, and would have "
                f"{stored}; release pins of the same prefix",
                renews=before is not None,
            )
        keys = _key_tokens(namespace) if before is None else 0
        cost = self._uncovered(text, len(tokens)) + keys
        if self.used + cost > self.budget:
            and_keys = f", {keys} of them for its extra_key and cache_salt" if keys else ""
            raise PinBudgetError(
                f"pinning {len(tokens)} tokens needs {cost} more tokens{and_keys}, but {self.used} of the budget of "
                f"{self.budget} are in use; release pins, pin a shorter prefix or raise the budget",
                renews=before is not None,
            )
        expires = None if ttl_steps is None else self.step + ttl_steps
        if before is not None and len(before.tokens) == len(tokens):
            pin = replace(before, expires=expires)
            self._pins[pin_id] = pin
        else:
            pin = Pin(pin_id, tuple(tokens), namespace, label, expires)
            if before is None:
                self._insert(pin)
            else:
                self._replace(before, pin)
        self._ends(pin)
        return pin

    def release(self, pin_id: int) -> Pin:
        """Ends a pin. Raises UnknownPinError if there is no such pin."""
        pin = self.get(pin_id)
        self._remove(pin)
        return pin

    def advance(self, steps: int = 1) -> list[Pin]:
        """Advances the time by scheduler steps; returns the pins that expired."""
        self.step += steps
        if self.step < self._next_end:
            return []
        ended = [pin for pin in self._pins.values() if pin.expires is not None and pin.expires <= self.step]
        for pin in ended:
            self._remove(pin)
        self._next_end = math.inf
        for pin in self._pins.values():
            self._ends(pin)
        return ended

    def shed_order(self, score: Callable[[Pin], float]) -> list[Pin]:
        """Pins in the order in which they are shed: lowest score first, then first to expire, then the newest."""
        newest_first = reversed(self._pins.values())
        return sorted(newest_first, key=lambda pin: (score(pin), math.inf if pin.expires is None else pin.expires))

    def shed(self, pin_id: int, kept: int = 0) -> Pin | None:
        """Shortens a pin to its first `kept` tokens; with 0 it ends. Returns the shortened pin.

        Raises:
            UnknownPinError: there is no such pin.
            ValueError: `kept` is negative or not below the length of the pin.
        """
        pin = self.get(pin_id)
        if not 0 <= kept < len(pin.tokens):
            raise ValueError(
                f"kept is {kept}: expected 0 to {len(pin.tokens) - 1} for a pin of {len(pin.tokens)} tokens"
            )
        if kept == 0:
            self._remove(pin)
            return None
        left = replace(pin, tokens=pin.tokens[:kept])
        self._replace(pin, left)
        return left

    def clear(self) -> list[Pin]:
        """Ends all pins; returns them."""
        pins = list(self._pins.values())
        self._pins.clear()
        self._sorted.clear()
        self._pinned = self._keys = self._stored = 0
        self._next_end = math.inf
        return pins

    def _ends(self, pin: Pin) -> None:
        if pin.expires is not None:
            self._next_end = min(self._next_end, pin.expires)

    def _insert(self, pin: Pin) -> None:
        self._count(pin)
        self._pins[pin.id] = pin

    def _remove(self, pin: Pin) -> None:
        self._uncount(pin)
        del self._pins[pin.id]

    def _replace(self, before: Pin, after: Pin) -> None:
        """Replaces a pin in place: it keeps its age."""
        self._uncount(before)
        self._insert(after)

    def _count(self, pin: Pin) -> None:
        text = _text(pin.tokens, pin.namespace)
        self._pinned += self._uncovered(text, len(pin.tokens))
        self._keys += _key_tokens(pin.namespace)
        self._stored += len(pin.tokens)
        insort(self._sorted, (text, pin.id))

    def _uncount(self, pin: Pin) -> None:
        text = _text(pin.tokens, pin.namespace)
        del self._sorted[bisect_left(self._sorted, (text, pin.id))]
        self._pinned -= self._uncovered(text, len(pin.tokens))
        self._keys -= _key_tokens(pin.namespace)
        self._stored -= len(pin.tokens)

    def _uncovered(self, text: bytes, length: int) -> int:
        """Tokens of a prefix that no pin covers. The neighbours in sorted order share most tokens with it."""
        place = bisect_left(self._sorted, (text, 0))
        neighbours = self._sorted[max(0, place - 1) : place + 1]
        return length - max((_shared(text, other) for other, _ in neighbours), default=0)


def _id(text: bytes, label: str) -> int:
    """53 bits, exact in every JSON reader; never 0."""
    digest = blake2b(text, digest_size=8, key=blake2b(label.encode(), digest_size=16).digest()).digest()
    return (int.from_bytes(digest, "little") >> 11) or 1


def _key_tokens(namespace: str | None) -> int:
    return -(-len((namespace or "").encode()) // BYTES_PER_TOKEN)


def _text(tokens: Sequence[int], namespace: str | None) -> bytes:
    """Bytes that sort as the tokens do, grouped by namespace."""
    head = (namespace or "").encode()
    return len(head).to_bytes(8, "big") + head + b"\0" * (-len(head) % 8) + np.array(tokens, dtype=">i8").tobytes()


def _shared(text: bytes, other: bytes) -> int:
    """Tokens that two prefixes share from the start."""
    head = 1 + -(-int.from_bytes(text[:8], "big") // 8)
    length = min(len(text), len(other)) // 8
    a = np.frombuffer(text, dtype=np.int64, count=length)
    b = np.frombuffer(other, dtype=np.int64, count=length)
    different = np.flatnonzero(a != b)
    return max(0, (length if not len(different) else int(different[0])) - head)
