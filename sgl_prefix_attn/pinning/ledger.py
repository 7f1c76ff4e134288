"""Who pinned what, and how many tokens that keeps from being evicted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sgl_prefix_attn.pinning.errors import PinBudgetError, UnknownPinError


@dataclass(frozen=True)
class Pin:
    """A prefix that is to stay cached.

    Attributes:
        id: number, never used twice.
        tokens: its token ids.
        namespace: prefixes of different namespaces share nothing.
        label: the owner's own words.
        expires: scheduler step at which it ends by itself, None: never.
    """

    id: int
    tokens: tuple[int, ...]
    namespace: str | None = None
    label: str = ""
    expires: int | None = None


@dataclass(frozen=True)
class Shed:
    """A pin that had to give way: what it was, and what is left of it (None: nothing)."""

    before: Pin
    after: Pin | None


class PinLedger:
    """Pins under a token budget. A prefix that several pins share counts once, also when one is part of another.

    Deterministic: what it does depends on the calls made to it and on nothing else.

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
        self._next_id = 1
        self._pinned = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def pinned_tokens(self) -> int:
        """Distinct tokens that are pinned."""
        return self._pinned

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

    def cost(self, tokens: Sequence[int], namespace: str | None = None) -> int:
        """Tokens that a pin of this prefix would add to those already pinned."""
        return self._alone(_text(tokens, namespace), len(tokens))

    def add(
        self, tokens: Sequence[int], *, namespace: str | None = None, label: str = "", ttl_steps: int | None = None
    ) -> Pin:
        """Pins a prefix.

        Raises:
            ValueError: there are no tokens, or ttl_steps is below 1.
            PinBudgetError: the budget does not allow it.
        """
        if not tokens:
            raise ValueError("there are no tokens to pin")
        if ttl_steps is not None and ttl_steps < 1:
            raise ValueError(f"ttl_steps is {ttl_steps}: a pin lasts at least one scheduler step")
        cost = self.cost(tokens, namespace)
        if self._pinned + cost > self.budget:
            raise PinBudgetError(
                f"pinning {len(tokens)} tokens needs {cost} more tokens, but {self._pinned} of the budget of "
                f"{self.budget} are pinned already; release pins, pin a shorter prefix or raise the budget"
            )
        pin = Pin(
            self._next_id,
            tuple(tokens),
            namespace,
            label,
            None if ttl_steps is None else self.step + ttl_steps,
        )
        self._next_id += 1
        self._insert(pin)
        return pin

    def release(self, pin_id: int) -> Pin:
        """Ends a pin, which cannot be released a second time. Raises UnknownPinError if there is no such pin."""
        pin = self.get(pin_id)
        self._remove(pin)
        return pin

    def advance(self, steps: int = 1) -> list[Pin]:
        """Time goes on by scheduler steps; returns the pins that ended."""
        self.step += steps
        ended = [pin for pin in self._pins.values() if pin.expires is not None and pin.expires <= self.step]
        for pin in ended:
            self._remove(pin)
        return ended

    def shed(self, tokens: int, worth: Callable[[Pin], float]) -> list[Shed]:
        """Gives up pins until at least `tokens` tokens are no longer pinned, or nothing is.

        The least worth goes first, then what expires first, then the newest. The last one is shortened rather than
        ended if a part of it suffices.
        """
        order = sorted(
            self._pins.values(),
            key=lambda pin: (worth(pin), float("inf") if pin.expires is None else pin.expires, -pin.id),
        )
        result = []
        for pin in order:
            if tokens <= 0:
                break
            before = self._pinned
            self._remove(pin)
            freed = before - self._pinned
            after = None
            if freed > tokens:
                after = replace(pin, tokens=pin.tokens[: len(pin.tokens) - tokens])
                self._insert(after)
            tokens -= before - self._pinned
            result.append(Shed(pin, after))
        return result

    def clear(self) -> list[Pin]:
        """Ends all pins; returns them."""
        pins = list(self._pins.values())
        self._pins.clear()
        self._sorted.clear()
        self._pinned = 0
        return pins

    def _insert(self, pin: Pin) -> None:
        text = _text(pin.tokens, pin.namespace)
        self._pinned += self._alone(text, len(pin.tokens))
        insort(self._sorted, (text, pin.id))
        self._pins[pin.id] = pin

    def _remove(self, pin: Pin) -> None:
        text = _text(pin.tokens, pin.namespace)
        del self._sorted[bisect_left(self._sorted, (text, pin.id))]
        del self._pins[pin.id]
        self._pinned -= self._alone(text, len(pin.tokens))

    def _alone(self, text: bytes, length: int) -> int:
        """Tokens of a prefix that no pin has: neighbours in sorted order share the most with it."""
        place = bisect_left(self._sorted, (text, 0))
        neighbours = self._sorted[max(0, place - 1) : place + 1]
        return length - max((_shared(text, other) for other, _ in neighbours), default=0)


def _text(tokens: Sequence[int], namespace: str | None) -> bytes:
    """Sorts as the tokens do; namespaces are apart."""
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
