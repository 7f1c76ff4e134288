"""The replays of benchmarks/cache: the limits are limits, and the real cache does what the block replay says."""

from __future__ import annotations

import random

import pytest

from benchmarks.cache import blocks
from benchmarks.cache.trace import Prompt

POOL = 60


def conversations(requests: int, seed: int = 1) -> list[Prompt]:
    """Conversations that go on after 15 to 30 other requests, among prompts that nobody asks again."""
    dice = random.Random(seed)
    number = 1
    due: dict[int, tuple[int, ...]] = {}
    prompts = []
    for now in range(requests):
        before = due.pop(now, (0,))
        goes_on = len(before) > 1 or dice.random() < 0.1
        new = dice.randint(1, 6)
        asked = (*before, *range(number, number + new))
        number += new
        prompts.append(Prompt(asked, len(asked) - 1))
        if goes_on and len(asked) < 30:
            due[now + dice.randint(15, 30)] = asked[:-1]
    return prompts


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return conversations(1500)


@pytest.mark.parametrize("lookahead", [8, 64])
def test_ours_with_a_queue_saves_what_the_limit_does(prompts: list[Prompt], lookahead: int) -> None:
    assert blocks.ours(prompts, POOL, lookahead) >= 0.95 * blocks.limit(prompts, POOL, lookahead)


@pytest.mark.parametrize(
    ("kind", "lookahead"), [("RadixCache", 0), ("UnifiedRadixCache", 0), ("UnifiedRadixCache", 16)]
)
def test_a_real_cache_takes_the_same_decisions(
    prompts: list[Prompt], kind: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    if hasattr(UnifiedRadixCache, "lock"):
        pytest.skip("the replay speaks to the caches of SGLang up to 0.5.22")
    from benchmarks.cache import real
    from sgl_prefix_attn.sglang_plugin.pinning import eviction_policy

    monkeypatch.setattr(eviction_policy, "_QUANTA", 1 << 30)  # evict exactly what is asked for
    done = real.replay(prompts, POOL, kind, "lru", retention=True, lookahead=lookahead)
    expected = blocks.ours(prompts, POOL, lookahead)
    # With a queue nodes can be split later than blocks are told apart, which may cost a few.
    assert done.saved == pytest.approx(expected, rel=0 if lookahead == 0 else 0.02)
