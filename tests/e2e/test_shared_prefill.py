"""Samples of a prompt that are requests of their own compute it about once, with the same tokens: the real server."""

from __future__ import annotations

import json

import pytest

from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Request
from tests.e2e.conftest import BACKEND, state_of
from tests.e2e.rollout import RETRACTS, Rollout

pytestmark = pytest.mark.e2e

SAMPLES = 8


@pytest.mark.versions
@pytest.mark.parametrize(
    ("chunk", "arguments"),
    [("512", ()), pytest.param("128", ("--enable-mixed-chunk", "--disable-overlap-schedule"), marks=pytest.mark.slow)],
)
def test_groups_that_arrive_at_once(launch, expected, vocabulary, chunk, arguments):
    prompts = [Request(f"group-{index}", vocabulary.tokens(700, 3, index), 6) for index in range(3)]
    stock = {prompt.prompt: samples[0] for prompt, samples in zip(prompts, expected(prompts), strict=True)}
    with launch(BACKEND, "--chunked-prefill-size", chunk, *arguments) as server:
        # Where one prompt fills many chunks, 0.5.23 ends a round before it comes to the next request.
        computed = ask_until_they_wait(server, stock, more_than=-1 if chunk == "128" else SAMPLES)
    assert computed < 1.6 * 3 * 700  # some tokens beside each prompt, pages, and a last token of each request


def test_random_rollouts_in_a_small_pool(launch, expected, vocabulary):
    """With aborts, retractions and flushes. A chunk of 128 makes the prefill of a long prompt several steps."""
    prompts = [Request(f"long-{length}", vocabulary.tokens(length, 14, 0), 60) for length in (640, 380, 40)]
    stock = {prompt.prompt: samples[0] for prompt, samples in zip(prompts, expected(prompts), strict=True)}
    arguments = ("--chunked-prefill-size", "128", "--schedule-conservativeness", "0.01")
    with launch(BACKEND, *arguments, pool_tokens=1000, environment=RETRACTS) as server:
        Rollout(server, stock, prompts).run_until_retracted(2, seconds=0.2)
        # The last chunk of this prompt leaves room in its round, so SGLang 0.5.23 comes to the next request.
        ask_until_they_wait(server, dict([*stock.items()][1:2]), more_than=0)


def ask_until_they_wait(server: Server, stock: dict[tuple[int, ...], list[int]], more_than: int) -> int:
    """Sends SAMPLES requests of each prompt in one message, again if they were too far apart to wait for each other.

    Args:
        more_than: waits of one message.

    Returns:
        Prompt tokens that a message computed, the most of all.
    """
    prompts, most = [*stock] * SAMPLES, 0
    greedy = {"temperature": 0, "ignore_eos": True, "max_new_tokens": len(stock[prompts[0]])}
    for _ in range(10):
        server.flush_cache()
        before = waits(server)
        answers = json.loads(server.post("/generate", {"input_ids": prompts, "sampling_params": greedy}))
        assert [answer["output_ids"] for answer in answers] == [stock[prompt] for prompt in prompts]
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        most = max(most, sum(map(len, prompts)) - cached)
        if waits(server) - before > more_than:
            return most
    raise AssertionError("requests do not wait for each other")


def waits(server: Server) -> int:
    """Requests that were passed over so far."""
    return int(state_of(server)["counters"]["shared_prefill_waits"])
