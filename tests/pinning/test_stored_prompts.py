"""What nodes keep of their prompts: all tokens and keys, with the common part stored once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sgl_prefix_attn.pinning import StoredPrompt, prefix_keys


@pytest.mark.parametrize("block", [1, 4])
def test_each_prompt_has_its_own_tokens_and_keys(block: int) -> None:
    dice = random.Random(block)
    prompts: list[tuple[list[int], StoredPrompt]] = []
    for _ in range(200):
        like, shared, tokens = None, 0, []
        if prompts:
            base, like = dice.choice(prompts[-10:])
            shared = dice.randint(0, len(base))
            tokens = base[:shared]
        tokens = [*tokens, *(dice.randint(1, 1 << 30) for _ in range(dice.randint(1, 9)))]
        keys = prefix_keys(tokens, block)
        prompts.append((tokens, StoredPrompt(tokens, keys, block, like=like, shared=shared)))
    for tokens, stored in prompts:
        assert list(stored) == prefix_keys(tokens, block)
        begin, end = sorted(dice.sample(range(len(tokens) + 2), 2))
        assert stored.tokens(begin, end).tolist() == tokens[begin:end]
        assert stored.tokens(0, len(tokens)).tolist() == tokens


def test_memory_of_retention_grows_with_the_cached_tokens() -> None:
    pytest.importorskip("sglang")
    from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
    from tests.pinning.small_server import SmallServer
    from tests.support.caches import CACHES

    server = SmallServer(CACHES[0], slots=1000, settings=PinningSettings(retention=True, block=4))
    for branch in range(40):
        server.serve([*range(400), *(1000 * branch + position for position in range(10))])
    parts: dict[int, Any] = {}
    retention: Any = server.manager.retention
    for node in retention._cached._nodes.values():
        part = node.prompt._last
        while part is not None:
            parts[id(part)], part = part, part.before
    assert sum(len(part.tokens) for part in parts.values()) <= 2 * retention._cached.tokens
    assert server.manager.counters.failures == 0
