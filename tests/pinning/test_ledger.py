"""The ledger: a shared prefix counts once, the budget holds, every pin ends exactly once."""

from __future__ import annotations

import random

import pytest

from sgl_prefix_attn.pinning import Pin, PinBudgetError, PinLedger, UnknownPinError


def distinct(pins: list[Pin]) -> int:
    """Distinct prefixes of all pins, counted the slow way."""
    return len({(pin.namespace, pin.tokens[:end]) for pin in pins for end in range(1, len(pin.tokens) + 1)})


def test_a_prefix_of_another_pin_costs_nothing() -> None:
    ledger = PinLedger(budget=100)
    ledger.add(range(50))
    assert ledger.cost(range(20)) == 0
    ledger.add(range(20))
    assert ledger.pinned_tokens == 50


def test_releasing_the_longer_of_two_leaves_the_shorter_one_pinned() -> None:
    ledger = PinLedger(budget=100)
    longer, shorter = ledger.add(range(50)), ledger.add(range(20))
    ledger.release(longer.id)
    assert ledger.pinned_tokens == 20
    assert ledger.pins() == [shorter]


def test_namespaces_share_nothing() -> None:
    ledger = PinLedger(budget=100)
    ledger.add(range(30), namespace="lora-a")
    ledger.add(range(30), namespace="lora-b")
    ledger.add(range(30))
    assert ledger.pinned_tokens == 90


def test_over_budget_is_refused_with_what_to_do_and_changes_nothing() -> None:
    ledger = PinLedger(budget=60)
    ledger.add(range(50))
    with pytest.raises(PinBudgetError, match=r"needs 30 more tokens, but 50 of the budget of 60 .* release pins"):
        ledger.add([*range(10), *range(100, 130)])
    assert (len(ledger), ledger.pinned_tokens) == (1, 50)


def test_a_pin_is_released_once() -> None:
    ledger = PinLedger(budget=60)
    pin = ledger.add(range(10))
    ledger.release(pin.id)
    with pytest.raises(UnknownPinError, match="no pin 1"):
        ledger.release(pin.id)
    assert ledger.pinned_tokens == 0


@pytest.mark.parametrize(("tokens", "ttl", "message"), [([], None, "no tokens"), ([1], 0, "ttl_steps is 0")])
def test_unusable_pins_are_refused(tokens: list[int], ttl: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PinLedger(budget=60).add(tokens, ttl_steps=ttl)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget is -1"):
        PinLedger(budget=-1)


def test_pins_end_after_their_scheduler_steps() -> None:
    ledger = PinLedger(budget=60)
    short, _ = ledger.add([1, 2], ttl_steps=3), ledger.add([3, 4], ttl_steps=4)
    assert ledger.advance(2) == []
    assert ledger.advance() == [short]
    assert ledger.pinned_tokens == 2


def test_the_least_worth_is_shed_first_then_what_expires_first_then_the_newest() -> None:
    ledger = PinLedger(budget=100)
    a, b, c, d = (ledger.add([name] * 10, ttl_steps=ttl) for name, ttl in ((1, None), (2, None), (3, 5), (4, None)))
    worth = {a.id: 0.5, b.id: 0.1, c.id: 0.1, d.id: 0.1}
    assert [shed.before.id for shed in ledger.shed(40, lambda pin: worth[pin.id])] == [c.id, d.id, b.id, a.id]


def test_the_last_pin_is_shortened_if_that_suffices() -> None:
    ledger = PinLedger(budget=100)
    pin = ledger.add(range(100))
    (shed,) = ledger.shed(30, lambda pin: 0.0)
    assert shed.before == pin
    assert shed.after is not None
    assert shed.after.tokens == tuple(range(70))
    assert shed.after.id == pin.id
    assert ledger.pinned_tokens == 70


def test_clearing_ends_everything() -> None:
    ledger = PinLedger(budget=100)
    pins = [ledger.add([1]), ledger.add([2])]
    assert ledger.clear() == pins
    assert (ledger.pins(), ledger.pinned_tokens) == ([], 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_count_every_shared_prefix_once(seed: int) -> None:
    dice = random.Random(seed)
    ledger = PinLedger(budget=60)
    for _ in range(200):
        action = dice.random()
        tokens = [dice.randint(1, 2) for _ in range(dice.randint(1, 12))]
        namespace = dice.choice([None, None, "x", "y" * 9])
        if action < 0.6:
            before, cost = ledger.pinned_tokens, ledger.cost(tokens, namespace)
            if before + cost > ledger.budget:
                with pytest.raises(PinBudgetError):
                    ledger.add(tokens, namespace=namespace)
            else:
                ledger.add(tokens, namespace=namespace, ttl_steps=dice.choice([None, 3, 10]))
                assert ledger.pinned_tokens == before + cost
        elif action < 0.8 and len(ledger):
            ledger.release(dice.choice(ledger.pins()).id)
        elif action < 0.9:
            ledger.advance()
        else:
            need, before = dice.randint(1, 15), ledger.pinned_tokens
            ledger.shed(need, lambda pin: pin.id % 3)
            assert before - ledger.pinned_tokens == min(before, need) or ledger.pinned_tokens <= before - need
        assert ledger.pinned_tokens == distinct(ledger.pins()) <= ledger.budget
