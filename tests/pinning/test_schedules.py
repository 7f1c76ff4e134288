"""Random schedules against SGLang's real caches: nothing hangs, nothing leaks, no lock is released twice."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.pinning import PinBudgetError
from sgl_prefix_attn.sglang_plugin import pinning_hooks
from sgl_prefix_attn.sglang_plugin.pinning_hooks import PinningSettings
from sgl_prefix_attn.sglang_plugin.pinning_locks import PLAIN, Namespace
from tests.pinning.small_server import CACHES, SmallServer

QUICK, FULL = 150, 10_000


@pytest.fixture(autouse=True)
def _no_hooks_afterwards() -> Iterator[None]:
    yield
    pinning_hooks.activate(None)


class RandomSchedule:
    """A history of one server: arrivals, aborts, flushes, retractions, and pins up to more than the pool."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        settings = PinningSettings(
            budget_percent=self.dice.choice([10, 50, 100, 100, 250]),
            retention=self.dice.random() < 0.6,
            lookahead=self.dice.choice([0, 2, 100]),
            block=self.dice.choice([1, 4, 16]),
        )
        slots = self.dice.choice([24, 40, 80, 200])
        self.server = SmallServer(self.dice.choice(CACHES), slots=slots, settings=settings)
        self.prompts: list[list[int]] = []
        self.sent = 0

    def prompt(self) -> list[int]:
        dice = self.dice
        base = dice.choice(self.prompts) if self.prompts and dice.random() < 0.7 else []
        tokens = base[: dice.randint(0, len(base))] + [dice.randint(1, 3) for _ in range(dice.randint(1, 15))]
        self.prompts = [*self.prompts[-20:], tokens]
        return tokens

    def act(self) -> None:
        dice, server = self.dice, self.server
        namespace = dice.choice([None, None, None, "lora"])
        action = dice.random()
        if action < 0.35:
            prompt, new_tokens = self.prompt(), dice.randint(1, 20)
            if server.fits(prompt, new_tokens):
                self.sent += 1
                server.send(prompt, new_tokens, extra_key=namespace)
        elif action < 0.40 and (server.waiting or server.running.reqs):
            server.abort(dice.choice([*server.waiting, *server.running.reqs]))
        elif action < 0.43:
            server.flush()
        elif action < 0.55:
            self.pin(Namespace(namespace) if namespace else PLAIN)
        elif action < 0.60 and len(server.keeper.ledger):
            server.keeper.release(dice.choice(server.keeper.ledger.pins()).id)
        else:
            server.step()
        server.check_accounting()
        assert server.keeper.counters.failures == 0

    def pin(self, namespace: Namespace) -> None:
        keeper = self.server.keeper
        tokens = self.prompt() if self.dice.random() < 0.3 or not self.prompts else self.dice.choice(self.prompts)
        try:
            keeper.pin(tokens, namespace, ttl_steps=self.dice.choice([None, None, 1, 5, 50]))
        except PinBudgetError:
            assert keeper.ledger.pinned_tokens + len(tokens) > keeper.ledger.budget

    def run(self, actions: int = 120) -> None:
        server = self.server
        for _ in range(actions):
            self.act()
        idle = 0
        while server.waiting or server.running.reqs:
            # Nothing run in a step means nothing will ever run: no time passes and nothing comes free.
            idle = 0 if server.step() else idle + 1
            assert idle < 2, f"hangs with {len(server.waiting)} waiting and {server.keeper.ledger.pinned_tokens} pinned"
            server.check_accounting()
        assert len(server.finished) + len(server.aborted) == self.sent
        assert server.keeper.counters.failures == 0
        for pin in server.keeper.ledger.pins():
            server.keeper.release(pin.id)
        assert server.cache.protected_size() == 0
        server.check_accounting()


def run(first: int, count: int) -> None:
    for seed in range(first, first + count):
        try:
            RandomSchedule(seed).run()
        except BaseException as error:
            error.add_note(f"RandomSchedule({seed}).run()")
            raise


def test_random_schedules() -> None:
    run(0, QUICK)


@pytest.mark.slow
def test_ten_thousand_random_schedules() -> None:
    run(QUICK, FULL - QUICK)
