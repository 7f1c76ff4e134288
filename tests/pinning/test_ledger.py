"""The ledger: a shared prefix counts once, the budget holds, every pin ends exactly once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Never

import pytest

from sgl_prefix_attn.pinning import Pin, PinBudgetError, PinLedger, UnknownPinError
from sgl_prefix_attn.pinning.ledger import BYTES_PER_TOKEN, MAX_PINS


def distinct(pins: list[Pin]) -> int:
    """Distinct prefixes of all pins, counted the slow way."""
    return len({(pin.namespace, pin.tokens[:end]) for pin in pins for end in range(1, len(pin.tokens) + 1)})


def test_a_pin_is_released_once() -> None:
    ledger = PinLedger(budget=60)
    pin = ledger.add(range(10))
    ledger.release(pin.id)
    with pytest.raises(UnknownPinError, match=f"no pin {pin.id}"):
        ledger.release(pin.id)
    assert ledger.pinned_tokens == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ledger: ledger.add([]), "no tokens"),
        (lambda ledger: ledger.add([1], ttl_steps=0), "ttl_steps is 0"),
        (lambda ledger: ledger.shed(ledger.add(range(10)).id, -1), "kept is -1"),
        (lambda ledger: ledger.shed(ledger.add(range(10)).id, 10), "kept is 10"),
        (lambda ledger: PinLedger(budget=-1), "budget is -1"),
    ],
)
def test_unusable_numbers_are_named(call: Callable[[PinLedger], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(PinLedger(budget=60))


def test_the_lowest_score_is_shed_first_then_what_expires_first_then_the_newest() -> None:
    ledger = PinLedger(budget=100)
    a, b, c, d = (ledger.add([name] * 10, ttl_steps=ttl) for name, ttl in ((1, None), (2, None), (3, 5), (4, None)))
    scores = {a.id: 0.5, b.id: 0.1, c.id: 0.1, d.id: 0.1}
    assert ledger.shed_order(lambda pin: scores[pin.id]) == [c, d, b, a]


def test_a_pin_gives_way_in_part_or_ends() -> None:
    ledger = PinLedger(budget=100)
    pin = ledger.add(range(100))
    left = ledger.shed(pin.id, kept=70)
    assert left == replace(pin, tokens=tuple(range(70)))
    assert ledger.get(pin.id) == left
    assert ledger.pinned_tokens == 70
    assert ledger.shed(pin.id) is None
    assert (ledger.pins(), ledger.pinned_tokens) == ([], 0)


def test_the_same_pin_again_renews_it() -> None:
    ledger = PinLedger(budget=100)
    first, other = ledger.add(range(10), label="system", ttl_steps=3), ledger.add(range(50), ttl_steps=9)
    ledger.advance(2)
    again = ledger.add(range(10), label="system", ttl_steps=5)
    assert (again.id, again.expires) == (first.id, 7)
    assert ledger.pins() == [again, other]
    assert ledger.advance(4) == []
    assert ledger.advance() == [again]
    assert ledger.add(range(50)).expires is None
    assert ledger.advance(10) == []


def test_pins_are_found_by_what_was_asked_for_whatever_is_left_of_them() -> None:
    ledger = PinLedger(100)
    whole, shortened = (ledger.add(range(10), label=label) for label in ("", "x"))
    other = ledger.add(range(6), label="x")
    left = ledger.shed(shortened.id, 6)
    assert ledger.of(range(10)) == [whole, left]
    assert ledger.of(range(6)) == [other]
    assert ledger.of(range(10), "lora") == ledger.of([0]) == ledger.of(range(11)) == []


def test_a_renewal_that_the_budget_does_not_allow_changes_nothing() -> None:
    ledger = PinLedger(budget=100)
    pin = ledger.add(range(100))
    ledger.shed(pin.id, kept=10)
    ledger.add(range(1000, 1050))
    with pytest.raises(PinBudgetError, match="needs 90 more tokens"):
        ledger.add(range(100))
    assert ledger.get(pin.id).tokens == tuple(range(10))
    assert ledger.pinned_tokens == 60


def test_a_number_stands_for_the_same_pin_in_every_ledger() -> None:
    """Copies of a model number by themselves, and have not all been asked for the same."""
    first, second = PinLedger(budget=100), PinLedger(budget=100)
    second.add(range(5))
    assert first.add(range(10), label="a").id == second.add(range(10), label="a").id
    kinds = itertools.product(([1], [2]), (None, "lora"), ("", "a"))
    ids = [first.add(tokens, namespace=namespace, label=label).id for tokens, namespace, label in kinds]
    assert len(set(ids)) == len(ids)
    assert all(0 < pin_id < 1 << 53 for pin_id in ids)


def test_the_keys_of_pins_count_against_the_budget() -> None:
    ledger = PinLedger(budget=20)
    key = "k" * 10 * BYTES_PER_TOKEN
    first = ledger.add([1], namespace=key)
    assert (ledger.pinned_tokens, ledger.used) == (1, 11)
    assert ledger.add([1], namespace=key) == first, "a renewal is free"
    message = "needs 10 more tokens, 10 of them for its extra_key and cache_salt, but 11 of the budget of 20 are in use"
    with pytest.raises(PinBudgetError, match=message):
        ledger.add([1], namespace=key, label="again")
    ledger.release(first.id)
    assert ledger.used == 0


def test_there_are_only_so_many_pins() -> None:
    ledger = PinLedger(budget=MAX_PINS)
    pins = [ledger.add([1], label=str(number)) for number in range(MAX_PINS)]
    with pytest.raises(PinBudgetError, match=rf"there are {MAX_PINS} pins.*release pins"):
        ledger.add([1])
    assert ledger.add([1], label="7") == pins[7]
    ledger.release(pins[0].id)
    ledger.add([1])


def test_what_is_longer_than_the_budget_is_refused_before_it_is_copied() -> None:
    class Long(list[int]):
        def __len__(self) -> int:
            return 1 << 40

        def __iter__(self) -> Never:
            raise AssertionError("copied")

    with pytest.raises(PinBudgetError, match="more than all of the budget of 100"):
        PinLedger(budget=100).add(Long([1]))


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_count_every_shared_prefix_once(seed: int) -> None:
    dice = random.Random(seed)
    ledger = PinLedger(budget=60)
    for _ in range(200):
        action = dice.random()
        tokens = [dice.randint(1, 2) for _ in range(dice.randint(1, 12))]
        namespace = dice.choice([None, None, "x", "y" * 9])
        if action < 0.6:
            before, cost, count = ledger.used, ledger.cost(tokens, namespace), len(ledger)
            label = dice.choice("ab")
            if before + cost > ledger.budget:
                with pytest.raises(PinBudgetError):
                    ledger.add(tokens, namespace=namespace, label="new")
            else:
                ledger.add(tokens, namespace=namespace, label=label, ttl_steps=dice.choice([None, 3, 10]))
                renewed = len(ledger) == count and namespace is not None
                assert ledger.used == before + cost - renewed, "a renewed pin has paid for its namespace"
        elif action < 0.8 and len(ledger):
            ledger.release(dice.choice(ledger.pins()).id)
        elif action < 0.9:
            ledger.advance()
        else:
            for pin in ledger.shed_order(lambda pin: len(pin.tokens) % 3)[:2]:
                ledger.shed(pin.id, dice.randrange(len(pin.tokens)))
        assert ledger.pinned_tokens == distinct(ledger.pins())
        assert ledger.used == ledger.pinned_tokens + sum(pin.namespace is not None for pin in ledger.pins())
        assert ledger.used <= ledger.budget


def test_pins_of_one_prefix_together_are_bounded() -> None:
    ledger = PinLedger(budget=10)
    pins = [ledger.add(range(10), label=str(number)) for number in range(4)]
    assert ledger.used == 10
    with pytest.raises(PinBudgetError, match="all pins together may have 40 tokens, each pin with its own"):
        ledger.add(range(10), label="another")
    with pytest.raises(PinBudgetError, match="would have 41"):
        ledger.add(range(1), label="another")
    ledger.add(range(10), label="0")  # a renewal stores nothing more
    ledger.release(pins[1].id)
    ledger.add(range(10), label="another")
    ledger.shed(pins[2].id, 4)
    ledger.add(range(6), label="a part")
    ledger.clear()
    for number in range(4):
        ledger.add(range(10), label=str(number))
