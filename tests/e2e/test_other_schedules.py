"""Chunked prefill, mixed chunks, no overlap, a pipeline, larger pages: the schedule changes, the tokens do not."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.workload import Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import (
    BACKEND,
    Expected,
    Launch,
    packing,
    replay_cached,
    replay_while_decoding,
    state_of,
    tokens_of,
)  # fmt: skip
from tests.support.ranks import TWO_RANKS

pytestmark = pytest.mark.e2e

MIXED_CHUNK = ("--enable-mixed-chunk", "--chunked-prefill-size", "64")


def test_chunked_prefill_without_overlap(launch: Launch, expected: Expected, vocabulary: Vocabulary) -> None:
    requests = workloads.ragged(vocabulary, 32)
    with launch(BACKEND, "--chunked-prefill-size", "64", "--disable-overlap-schedule") as server:
        with packing(server, "decode", "extend"):
            answers = replay(server.url, requests)
        assert tokens_of(answers) == expected(requests)

        decoding, arriving = workloads.prefill_beside_decode(vocabulary)
        with packing(server, "decode", "extend"):
            answers = replay_while_decoding(server.url, decoding, arriving)
        assert tokens_of(answers) == expected(decoding + arriving)


@pytest.mark.parametrize(
    "overlap",
    [
        pytest.param(True, marks=pytest.mark.versions, id="overlap"),
        pytest.param(False, marks=pytest.mark.slow, id="no-overlap"),
    ],
)
def test_mixed_chunk(launch: Launch, expected: Expected, vocabulary: Vocabulary, overlap: bool) -> None:
    decoding, arriving = workloads.prefill_beside_decode(vocabulary)
    schedule = () if overlap else ("--disable-overlap-schedule",)
    with launch(BACKEND, *MIXED_CHUNK, *schedule) as server, packing(server, "decode", "mixed"):
        answers = replay_while_decoding(server.url, decoding, arriving)
    assert tokens_of(answers) == expected(decoding + arriving)


def test_a_pipeline(launch: Launch, expected: Expected, vocabulary: Vocabulary) -> None:
    """Its microbatches take turns. Each keeps its plan."""
    requests = workloads.diverging(vocabulary)
    with launch(BACKEND, "--pp-size", "2", environment=TWO_RANKS) as server:
        with packing(server, "decode"):
            answers = replay(server.url, requests)
        counters = state_of(server)["counters"]
    assert tokens_of(answers) == expected(requests)
    assert counters["plans_reused"] > counters["plans_made"]


@pytest.mark.slow
def test_pages_of_16_tokens(launch: Launch, expected: Expected, vocabulary: Vocabulary) -> None:
    """SGLang allocates pages with Triton kernels. A CPU interprets them."""
    requests = workloads.three_levels(vocabulary)
    with launch(BACKEND, "--page-size", "16", environment={"TRITON_INTERPRET": "1"}) as server:
        answers, _ = replay_cached(server, requests, "decode", "extend")
    assert tokens_of(answers) == expected(requests)
