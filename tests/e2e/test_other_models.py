"""Models whose attention is not plain: tokens as transformers computes them."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.demo.workload import Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, Launch, packing
from tests.e2e.reference import Reference

pytestmark = pytest.mark.e2e


def test_layers_with_a_sliding_window(launch: Launch, vocabulary: Vocabulary) -> None:
    """Gemma 2: every other layer sees the last 64 tokens only, far fewer than the prompts share."""
    model = tiny_model("gemma2")
    requests = workloads.three_levels(vocabulary)
    with launch(BACKEND, model=model) as server:
        replay(server.url, workloads.level_seeds(requests))
        with packing(server) as done:
            answers = replay(server.url, requests)
    reference = Reference(model)
    for answer in answers:
        reference.check(answer.request, answer.samples[0].tokens)
    done.assert_packed("decode", "extend")
