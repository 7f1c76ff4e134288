"""Models and KV caches that are not plain: tokens as transformers or the stock backend computes them."""

from __future__ import annotations

import importlib.metadata

import pytest

from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.demo.workload import Vocabulary
from sgl_prefix_attn.sglang_plugin.doctor.diagnosis import diagnose
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, WAYS, Launch, compared, replay_cached
from tests.e2e.reference import Reference

pytestmark = pytest.mark.e2e
VERSION = tuple(int(part) for part in importlib.metadata.version("sglang").split(".")[:3] if part.isdigit())


def test_layers_with_a_sliding_window(launch: Launch, vocabulary: Vocabulary) -> None:
    """Gemma 2: every other layer sees the last 64 tokens only, far fewer than the prompts share."""
    model = tiny_model("gemma2")
    requests = workloads.three_levels(vocabulary)
    with launch(BACKEND, model=model) as server:
        answers, _ = replay_cached(server, requests, "decode", "extend")
    reference = Reference(model)
    for answer in answers:
        reference.check(answer.request, answer.samples[0].tokens)


@pytest.mark.versions
def test_window_layers_with_kv_slots_of_their_own(launch: Launch, vocabulary: Vocabulary) -> None:
    """Cohere 2 with a sliding-window pool: full layers run packed, window layers stock.

    SGLang's torch_native reads window layers at the slots of full layers. Both have the same numbers until as many
    tokens as the pool holds were allocated, so the workloads stay below that.
    """
    workload = [workloads.three_levels(vocabulary), workloads.samples(vocabulary)]
    arguments, model = ("--chunked-prefill-size", "256"), tiny_model("cohere2")
    ran = compared(launch, workload, *arguments, ways=list(WAYS), model=model)
    for (done, state, log), (backend, environment) in zip(ran, WAYS.values(), strict=True):
        assert "SWAKVPool" in log
        assert done.kv.saved > 0.6
        assert state["layers"] == {"packed": 2, "stock": {"hybrid_swa": 2}}
        words = ["--model-path", str(model), "--device", "cpu", "--attention-backend", backend, *arguments]
        told = {text.split(",")[0]: str(answer.reason) for text, answer in diagnose(words, environment).layers}
        assert told == {"2 x full attention": "None", "2 x sliding window with KV slots of its own": "hybrid_swa"}


@pytest.mark.versions
@pytest.mark.skipif(VERSION >= (0, 5, 20), reason="this SGLang wants AMX and its own backend for fp8 KV on a CPU")
def test_fp8_kv_without_scales(launch: Launch, vocabulary: Vocabulary) -> None:
    workload = [workloads.three_levels(vocabulary), workloads.ragged(vocabulary)]
    ((_, state, _),) = compared(launch, workload, "--kv-cache-dtype", "fp8_e4m3")
    assert state["shape"]["kv_bytes"] == 1
