"""Samples of a prompt that are requests of their own compute it about once, with the same tokens: the real server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e.conftest import BACKEND, Launch, Tokens, tokens_of
from tests.e2e.rollout import Rollout

pytestmark = pytest.mark.e2e

SHARED = {"PREFIXPACK_SHARED_PREFILL": "1", "PREFIXPACK_ONE_TOKEN_STEPS": "1"}
SAMPLES = 8


@pytest.mark.versions
@pytest.mark.parametrize(
    ("chunk", "arguments"),
    [("512", ()), pytest.param("128", ("--enable-mixed-chunk", "--disable-overlap-schedule"), marks=pytest.mark.slow)],
)
def test_groups_that_arrive_at_once(
    launch: Launch,
    expected: Callable[[Sequence[Request]], Tokens],
    vocabulary: Vocabulary,
    chunk: str,
    arguments: tuple[str, ...],
) -> None:
    prompts = [Request(f"group-{index}", vocabulary.tokens(700, 3, index), 6) for index in range(3)]
    stock = {prompt.prompt: samples[0] for prompt, samples in zip(prompts, expected(prompts), strict=True)}
    requests = [
        dataclasses.replace(prompt, name=f"{prompt.name}-{sample}") for prompt in prompts for sample in range(SAMPLES)
    ]
    with launch(BACKEND, "--chunked-prefill-size", chunk, *arguments, environment=SHARED) as server:
        answers = replay(server.url, requests)
        state = server.packing_state()
    assert [tokens for (tokens,) in tokens_of(answers)] == [stock[request.prompt] for request in requests]
    computed = sum(len(answer.request.prompt) - answer.samples[0].cached_tokens for answer in answers)
    assert computed < 1.6 * 3 * 700  # 256 tokens beside each prompt, pages, and a last token of each request
    assert state is not None
    # Where one prompt fills many chunks, 0.5.23 ends a round before it comes to the next request.
    assert state["counters"]["shared_prefill_waits"] > SAMPLES or chunk == "128"


def test_random_rollouts_in_a_small_pool(
    launch: Launch, expected: Callable[[Sequence[Request]], Tokens], vocabulary: Vocabulary
) -> None:
    """With aborts, retractions and flushes. A chunk of 128 makes the prefill of a long prompt several steps."""
    prompts = [Request(f"long-{length}", vocabulary.tokens(length, 14, 0), 60) for length in (640, 380, 40)]
    stock = {prompt.prompt: samples[0] for prompt, samples in zip(prompts, expected(prompts), strict=True)}
    arguments = ("--chunked-prefill-size", "128", "--schedule-conservativeness", "0.01")
    with launch(BACKEND, *arguments, pool_tokens=1000, environment=SHARED) as server:
        rollout = Rollout(server, stock, prompts)
        for seed in range(5):
            if seed < 2 or rollout.retractions == 0:
                rollout.run(seed, seconds=0.2)
        state = server.packing_state()
    assert rollout.retractions > 0
    assert state is not None
    assert state["counters"]["shared_prefill_waits"] > 0
