"""Servers with speculative decoding: tokens of plain greedy decoding, from packed verify steps.

SGLang's CPU engine lacks what `tests/support/cpu_speculation` adds.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, packing, tokens_of
from tests.e2e.rollout import RETRACTS, SMALL_POOL

VERSIONS = ("0.5.20", "0.5.23")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.metadata.version("sglang") not in VERSIONS, reason="written for others"),
]

SHIMS = Path(__file__).parents[1] / "support" / "cpu_speculation"
# The model is its own draft model, so most drafts are accepted. Four drafts in a chain.
STANDALONE = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(tiny_model()))
# Eight drafts in a tree, from text that was seen before.
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
BREADTH_1 = ("--speculative-ngram-max-bfs-breadth", "1")


@pytest.fixture
def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(SHIMS), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(STANDALONE, [*workloads.ALL], id="chains"),
        pytest.param(NGRAM, [*workloads.ALL], id="trees"),
        pytest.param((*NGRAM, *BREADTH_1), ["ragged", "ragged"], id="breadth 1"),
    ],
)
@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding(launch, expected, vocabulary, environment, arguments, names):
    with launch(BACKEND, *arguments, environment=environment) as server, packing(server, "verify", "extend") as done:
        for name in names:
            requests = workloads.ALL[name](vocabulary)
            assert tokens_of(replay(server.url, requests)) == expected(requests)
    assert done.steps["decode"] == 0


@pytest.mark.parametrize(
    ("seeds", "count"), [pytest.param(1, 24, id="one"), pytest.param(10, 48, id="ten", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("arguments", [STANDALONE, NGRAM, (*NGRAM, *BREADTH_1)], ids=["chains", "trees", "breadth 1"])
def test_random_rollouts(launch, rollout_on, environment, arguments, seeds, count):
    """With aborts, retractions and flushes."""
    conservative = ("--schedule-conservativeness", "0.01")
    environment |= RETRACTS
    with launch(BACKEND, *arguments, *conservative, pool_tokens=SMALL_POOL, environment=environment) as server:
        rollout = rollout_on(server)
        with packing(server, "verify", "extend") as done:
            rollout.run_until_retracted(seeds, count, seconds=0.3)
    assert done.steps["decode"] == 0
