"""The tracker against SGLang's real radix trees: the sharing it reports is exactly the tree's, after any history."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker
from sgl_prefix_attn.sglang_plugin.prefix.one_token import OneTokenSteps
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from tests.sglang_plugin.prefix.sharing import check
from tests.support.small_scheduler import TREES, SmallScheduler


class RandomHistory:
    """Random requests over a small alphabet, so that prefixes are shared, split and extended all the time."""

    def __init__(self, kind: str, seed: int, *, one_token_steps: bool, drafts: int, microbatches: int) -> None:
        self.random = random.Random(seed)
        self.one_token_steps = one_token_steps
        self.drafts = drafts
        self.scheduler = SmallScheduler(kind, slots=2500)
        self.tracker = BatchTracker(microbatches)
        self.microbatches = microbatches
        self.joined: dict[int, int] = {}  # id of a request: its microbatch
        if one_token_steps:
            self.tracker.runs_as_decode = OneTokenSteps(Counters()).applies
        self.seen: list[list[int]] = []
        self.retracted: list[Any] = []

    def prompt(self) -> list[int]:
        choice = self.random.random()
        if self.seen and self.one_token_steps and choice < 0.4:
            return self.random.choice(self.seen)
        if self.seen and choice < 0.8:
            base = self.random.choice(self.seen)
            cut = self.random.randint(1, len(base))
            tokens = base[:cut]
        else:
            tokens = []
        tokens = tokens + [self.random.randint(1, 3) for _ in range(self.random.randint(1, 20))]
        self.seen = [*self.seen[-60:], tokens]
        return tokens

    def admit(self) -> None:
        scheduler = self.scheduler
        joining = []
        for _ in range(self.random.randint(1, 3)):
            if self.retracted and self.random.random() < 0.7:
                request = self.retracted.pop()
            else:
                request = scheduler.request(self.prompt(), extra_key=self.random.choice([None, None, None, "lora"]))
            chunk = self.random.choice([None, None, 7])
            scheduler.match(request, upto=chunk)
            joining.append(request)
        decoding = scheduler.running if self.random.random() < 0.3 else []
        if decoding:
            scheduler.decode()
        check(scheduler, self.tracker, scheduler.extend_batch(joining, decoding))
        for request in joining:
            while scheduler.ranges[id(request)][1] < len(request.full_untruncated_fill_ids):
                scheduler.prefill_done(request, chunked=True)
                scheduler.next_chunk(request, 7)
                check(scheduler, self.tracker, scheduler.extend_batch([request]))
        scheduler.running += joining
        if self.random.random() < 0.5:  # overlap: the first decode step runs before the prefill's result is processed
            scheduler.decode()
            self.check_decode()
        for request in joining:
            scheduler.prefill_done(request)

    def check_decode(self) -> None:
        """A decode step of each microbatch. Requests stay in theirs until they are retracted."""
        running = self.scheduler.running
        here = {id(request) for request in running}
        self.joined = {known: place for known, place in self.joined.items() if known in here}
        for request in running:
            self.joined.setdefault(
                id(request), self.random.randrange(self.microbatches) if self.microbatches > 1 else 0
            )
        for place in range(self.microbatches):
            members = [request for request in running if self.joined[id(request)] == place]
            if members:
                check(self.scheduler, self.tracker, self.scheduler.decode_batch(members))

    def decode(self) -> None:
        """A decode step, or where drafts are checked one that accepts some of them."""
        if not self.drafts:
            self.scheduler.decode()
            self.check_decode()
            return
        check(self.scheduler, self.tracker, self.scheduler.verify_batch(self.drafts))
        for _ in range(self.random.randint(1, self.drafts)):
            self.scheduler.decode()

    def step(self) -> None:
        scheduler = self.scheduler
        choice = self.random.random()
        if choice < 0.35 and len(scheduler.running) < 8:
            self.admit()
        elif choice < 0.5 and scheduler.running:
            request = self.random.choice(scheduler.running)
            scheduler.finish(request, insert=self.random.random() < 0.8)
            if self.random.random() < 0.3:  # still in the batch that is in flight
                self.check_decode()
            scheduler.filter()
        elif choice < 0.55 and scheduler.running:
            self.retracted.append(self.random.choice([*scheduler.running, scheduler.running[-1]]))
            scheduler.retract(self.retracted[-1])
            if self.random.random() < 0.3:
                scheduler.evict(500)
            if self.random.random() < 0.5:  # the same batch again, with another row and node
                self.admit()
        elif choice < 0.6:
            scheduler.evict(self.random.randint(1, 200))
        elif choice < 0.61:
            come_back = self.random.random() < 0.5
            for request in list(scheduler.running):
                if come_back:
                    scheduler.retract(request)
                    self.retracted.append(request)
                else:
                    scheduler.finish(request)
            scheduler.filter()
            scheduler.flush()
            self.admit()
        elif choice < 0.65:
            self.random.shuffle(scheduler.running)
        if scheduler.running:
            self.decode()


@pytest.mark.parametrize("steps", [300, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}), (1, {}), (2, {"one_token_steps": True}), (3, {"one_token_steps": True}), (4, {"drafts": 4}),
        (5, {"microbatches": 2}), (6, {"microbatches": 3}),
    ],
)  # fmt: skip
def test_sharing_is_exact_after_every_step_of_a_random_history(kind, seed, options, steps):
    history = RandomHistory(kind, seed, **{"one_token_steps": False, "drafts": 0, "microbatches": 1, **options})
    for _ in range(steps):
        history.step()
        assert history.tracker.restarts == 0  # exact because what was known was right, not because it was thrown away
