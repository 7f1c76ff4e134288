"""One-token steps on the real server: random rollouts with refills give the stock backend's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from sgl_prefix_attn.demo.server import Server
from tests.e2e.conftest import BACKEND, Launch, Packing, packing
from tests.e2e.rollout import SMALL_POOL, Rollout

pytestmark = pytest.mark.e2e

ONE_TOKEN = {"PREFIXPACK_ONE_TOKEN_STEPS": "1"}
MIXED_CHUNK = ("--enable-mixed-chunk", "--chunked-prefill-size", "128")
NO_OVERLAP = "--disable-overlap-schedule"


def check(done: Packing, *modes: str) -> None:
    """There were one-token steps of these modes; they ran packed, as decode steps."""
    assert all(done.one_token[mode] > 0 for mode in modes), done.one_token
    done.assert_packed("decode")
    assert done.steps["decode"] > done.one_token.total()


@pytest.mark.parametrize(("arguments", "mode"), [(MIXED_CHUNK, "mixed"), ((), "extend")], ids=["mixed", "plain"])
def test_random_rollouts_in_a_small_pool(
    launch: Launch, rollout_on: Callable[[Server], Rollout], arguments: tuple[str, ...], mode: str
) -> None:
    """With aborts, retractions and flushes. Without mixed chunk, a refill is a prefill of one token by itself."""
    conservative = ("--schedule-conservativeness", "0.01")
    with launch(BACKEND, *arguments, *conservative, pool_tokens=SMALL_POOL, environment=ONE_TOKEN) as server:
        rollout = rollout_on(server)
        with packing(server) as done:
            for seed in range(5):
                if seed < 2 or rollout.retractions == 0:  # a fast machine has fewer requests at once
                    rollout.run(seed)
    check(done, mode)
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
