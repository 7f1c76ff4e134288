"""A random history of a server: arrivals, aborts, flushes, retractions, offline groups, and pins up to more than fits.

    python -m tests.pinning.random_schedule FIRST COUNT

runs the schedules with the seeds from FIRST on and prints what they did. It ends with a traceback and the seed when a
schedule fails.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER, Place, SharedPrefix
from sgl_prefix_attn.pinning import PinBudgetError
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import PLAIN, Namespace
from tests.pinning.small_server import SmallServer
from tests.support.caches import CACHES


class RandomSchedule:
    """Asserts after each action that no slot is lost and no hook failed, and at the end that nothing hung or is locked.

    Attributes:
        did: how often things happened.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        settings = PinningSettings(
            budget_percent=self.dice.choice([10, 50, 100, 100, 250]),
            retention=self.dice.random() < 0.6,
            jobs=True,
            lookahead=self.dice.choice([0, 2, 100]),
            block=self.dice.choice([1, 4, 16]),
        )
        slots = self.dice.choice([24, 40, 80, 200])
        self.kind = self.dice.choice(CACHES)
        self.server = SmallServer(self.kind, slots=slots, settings=settings)
        self.prompts: list[list[int]] = []
        self.sent = 0
        self.did: Counter[str] = Counter()
        self.groups: list[tuple[SharedPrefix, list[int]]] = []

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
            self.send(namespace)
        elif action < 0.40 and (server.waiting or server.running.reqs):
            self.did["aborts"] += 1
            server.abort(dice.choice([*server.waiting, *server.running.reqs]))
        elif action < 0.43:
            self.did["flushes"] += server.flush()
        elif action < 0.55:
            self.pin(Namespace(namespace) if namespace else PLAIN)
        elif action < 0.60 and len(server.manager.pins.ledger):
            server.manager.release(dice.choice(server.manager.pins.ledger.pins()).id)
        else:
            server.step()
        self.check()

    def send(self, namespace: str | None) -> None:
        dice, server = self.dice, self.server
        prompt, new_tokens = self.prompt(), dice.randint(1, 20)
        place = None
        if dice.random() < 0.2:
            if not self.groups or dice.random() < 0.3:
                prefix = SharedPrefix(len(self.groups), 0, len(prompt), dice.randint(1, 6))
                self.groups.append((prefix, prompt))
            # Some groups never come to their last request, and some get more than they said.
            prefix, shared = dice.choice(self.groups[-3:])
            prompt = shared + [dice.randint(1, 3) for _ in range(dice.randint(0, 4))]
            place = Place("job", self.sent, 0, new_tokens, (prefix,))
        if server.fits(prompt, new_tokens):
            self.sent += 1
            request = server.send(prompt, new_tokens, extra_key=namespace)
            if place is not None:
                self.did["requests of offline groups"] += 1
                request.sampling_params.custom_params = {CUSTOM_PARAMETER: place.encode()}

    def pin(self, namespace: Namespace) -> None:
        manager = self.server.manager
        tokens = self.prompt() if self.dice.random() < 0.3 or not self.prompts else self.dice.choice(self.prompts)
        try:
            manager.pin(tokens, namespace, ttl_steps=self.dice.choice([None, None, 1, 5, 50]))
        except PinBudgetError:
            self.did["pins refused"] += 1
            ledger = manager.pins.ledger
            assert ledger.used + max(len(tokens), ledger.cost(tokens, namespace.text)) > ledger.budget

    def check(self) -> None:
        self.server.check_accounting()
        assert self.server.manager.counters.failures == 0

    def run(self, actions: int = 120) -> None:
        server = self.server
        for _ in range(actions):
            self.act()
        idle = 0
        while server.waiting or server.running.reqs:
            # Nothing run in a step means nothing will ever run: no time passes and nothing comes free.
            idle = 0 if server.step() else idle + 1
            pinned = server.manager.pins.ledger.pinned_tokens
            assert idle < 2, f"hangs with {len(server.waiting)} waiting and {pinned} pinned"
            self.check()
        assert len(server.finished) + len(server.aborted) == self.sent
        for pin in server.manager.pins.ledger.pins():
            server.manager.release(pin.id)
        assert server.cache.protected_size() == 0
        self.check()
        counters = server.manager.counters
        self.did.update({f"schedules on {self.kind}": 1, "requests": self.sent, "retractions": server.retractions})
        for end in ("made", "shed", "expired", "released"):
            self.did[f"pins {end}"] = getattr(counters, f"pins_{end}")
        self.did["evictions avoided, tokens"] = counters.evictions_avoided


def run(first: int, count: int) -> Counter[str]:
    """Runs the schedules with these seeds; returns what they did."""
    did: Counter[str] = Counter()
    for seed in range(first, first + count):
        schedule = RandomSchedule(seed)
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"RandomSchedule({seed}).run()")
            raise
        did += schedule.did
    return did


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    print(json.dumps(dict(sorted(run(first, count).items())), indent=1))
