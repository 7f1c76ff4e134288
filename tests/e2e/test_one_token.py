"""One-token steps on the real server: random rollouts with refills give the stock backend's tokens."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sgl_prefix_attn.demo.client import Sample, replay
from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, Launch, Packing, Tokens, packing

pytestmark = pytest.mark.e2e

Expected = Callable[[Sequence[Request]], Tokens]
ONE_TOKEN = {"PREFIXPACK_ONE_TOKEN_STEPS": "1"}
MIXED_CHUNK = ("--enable-mixed-chunk", "--chunked-prefill-size", "128")
NO_OVERLAP = "--disable-overlap-schedule"
# Holds the prompts and a few outputs, so SGLang retracts requests.
SMALL_POOL = 700


@dataclasses.dataclass
class Rollout:
    """Requests for few prompts, which arrive while others decode; some are aborted.

    Attributes:
        retractions: of all requests of all runs.
    """

    server: Server
    stock: dict[tuple[int, ...], list[int]]
    prompts: list[Request]
    retractions: int = 0

    def run(self, seed: int, count: int = 48) -> None:
        """Runs the schedule of a seed on an empty cache and compares all tokens."""
        self.server.flush_cache()
        draw = np.random.default_rng(seed)
        requests = [
            dataclasses.replace(
                self.prompts[int(draw.integers(len(self.prompts)))],
                name=f"{seed}-{number}",
                max_new_tokens=int(draw.integers(1, 61)),
                arrival_seconds=float(draw.uniform(0, 1.0)),
            )
            for number in range(count)
        ]
        victims = {request.name for request in requests if request.max_new_tokens > 30 and draw.random() < 0.15}
        told: set[str] = set()

        def abort(request: Request, sample: Sample) -> None:
            if request.name in victims - told and len(sample.tokens) >= 5:
                told.add(request.name)
                threading.Thread(target=self.server.post, args=("/abort_request", {"rid": sample.request_id})).start()

        for answer in replay(self.server.url, requests, on_token=abort):
            (sample,) = answer.samples
            stock = self.stock[answer.request.prompt][: answer.request.max_new_tokens]
            assert sample.tokens == (stock[: len(sample.tokens)] if answer.request.name in victims else stock)
            self.retractions += sample.retractions


@pytest.fixture
def rollout_on(expected: Expected, vocabulary: Vocabulary) -> Callable[[Server], Rollout]:
    prompts = workloads.refills(vocabulary)
    stock = {request.prompt: samples[0] for request, samples in zip(prompts, expected(prompts), strict=True)}
    return lambda server: Rollout(server, stock, prompts)


def check(done: Packing, *modes: str) -> None:
    """There were one-token steps of these modes; they ran packed, as decode steps."""
    assert all(done.one_token[mode] > 0 for mode in modes), done.one_token
    done.assert_packed("decode")
    assert done.steps["decode"] > done.one_token.total()


def test_random_rollouts_with_mixed_chunk_and_a_small_pool(
    launch: Launch, rollout_on: Callable[[Server], Rollout]
) -> None:
    conservative = ("--schedule-conservativeness", "0.01")
    with launch(BACKEND, *MIXED_CHUNK, *conservative, pool_tokens=SMALL_POOL, environment=ONE_TOKEN) as server:
        rollout = rollout_on(server)
        with packing(server) as done:
            for seed in range(3):
                rollout.run(seed)
    check(done, "mixed")
    assert rollout.retractions > 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), MIXED_CHUNK, (NO_OVERLAP,), (*MIXED_CHUNK, NO_OVERLAP)], ids=str)
@pytest.mark.parametrize("pool", [SMALL_POOL, 16384])
def test_many_random_rollouts(
    launch: Launch, rollout_on: Callable[[Server], Rollout], arguments: tuple[str, ...], pool: int
) -> None:
    with launch(
        BACKEND, *arguments, "--schedule-conservativeness", "0.01", pool_tokens=pool, environment=ONE_TOKEN
    ) as server:
        rollout = rollout_on(server)
        total = Counter[str]()
        for seed in range(100, 125):
            with packing(server) as done:
                rollout.run(seed)
            total += done.one_token
    assert total["mixed" if arguments[:1] == MIXED_CHUNK[:1] else "extend"] > 25
    assert set(done.fallbacks) <= {"no_cached_prefix", "idle"}
