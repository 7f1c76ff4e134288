"""The real server with SGLang's default schedule (overlap on): the stock backend's tokens, from packed steps."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from examples.rollout_client import rollout
from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import Expected, packing, replay_cached, replay_while_decoding, state_of, tokens_of

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def server(packed: Server) -> Server:
    """The shared server with an empty cache."""
    packed.flush_cache()
    return packed


@pytest.mark.versions
def test_prompts_that_share_three_levels(server: Server, expected: Expected, vocabulary: Vocabulary) -> None:
    requests = workloads.three_levels(vocabulary)
    answers, _ = replay_cached(server, requests, "decode", "extend")
    assert tokens_of(answers) == expected(requests)
    assert all(answer.samples[0].cached_tokens >= 288 for answer in answers)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        pytest.param("ragged", ("decode",), marks=pytest.mark.versions),
        pytest.param("samples", ("decode", "extend"), marks=pytest.mark.versions),
        ("diverging", ("decode",)),
    ],
)
def test_requests_sent_together(server, expected, vocabulary, name, modes):
    requests = workloads.ALL[name](vocabulary)
    with packing(server, *modes) as done:
        answers = replay(server.url, requests)
    assert [answer.request for answer in answers] == requests
    assert tokens_of(answers) == expected(requests)
    assert done.kv is not None
    if name == "samples":
        assert len(answers[0].samples) == 16
        assert done.kv.saved > 0.5
    if name == "diverging":
        assert len({tuple(answer.samples[0].tokens) for answer in answers}) == 16


def test_a_late_request_splits_a_node_that_others_run_on(server, expected, vocabulary):
    running, late = workloads.late_split(vocabulary)
    replay(server.url, [dataclasses.replace(running[0], prompt=running[0].prompt[:400], max_new_tokens=1)])
    with packing(server, "decode", "extend"):
        answers = replay_while_decoding(server.url, running, late)
    assert tokens_of(answers) == expected(running + late)
    assert answers[-1].samples[0].cached_tokens == 250


def test_the_rollout_client_of_the_examples(server: Server, vocabulary: Vocabulary) -> None:
    prompts = [request.prompt for request in workloads.samples(vocabulary)][:1]
    sampling = {"max_new_tokens": 16, "ignore_eos": True}
    with packing(server) as done:
        samples = list(rollout(server.url, prompts, 6, 3, sampling))
    assert [(sample.prompt, sample.tokens) for sample in samples] == [(0, 16)] * 6
    assert sum(sample.cached_tokens >= len(prompts[0]) - 1 for sample in samples) >= 3
    assert done.steps["decode"] > 0


def test_metrics_join_those_of_sglang(server: Server, vocabulary: Vocabulary) -> None:
    replay(server.url, workloads.samples(vocabulary))
    state = state_of(server)
    exported = _metrics(server.get("/metrics"))
    dashboard = (EXAMPLES / "grafana" / "prefixpack.json").read_text()
    asked = {f"sglang:{name}" for name in re.findall(r"sglang\[:_\](\w+)", dashboard)}
    assert {name for name in asked if "prefixpack" not in name} <= set(exported)
    for name, counter in (("plans_made", "plans_made"), ("kv_tokens_read", "kv_tokens_read")):
        assert exported[f"sglang:prefixpack_{name}_total"] == state["counters"][counter] > 0
    assert exported["sglang:prefixpack_kv_tokens_saved_total"] > 0


def _metrics(text: str) -> dict[str, float]:
    """Prometheus text as name -> sum over its label sets."""
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{.*\})? (\S+)$", text, flags=re.MULTILINE):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals
