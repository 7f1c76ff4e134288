"""One-token steps on the real server: random rollouts with refills give the stock backend's tokens."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import ServerOptions, serve
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.demo.workload import Vocabulary
from tests.e2e import life_cycle
from tests.e2e.conftest import BACKEND, Packing, packing
from tests.e2e.reference import SMALLEST_MARGIN, Reference
from tests.e2e.rollout import RETRACTS, SMALL_POOL

pytestmark = pytest.mark.e2e

ONE_TOKEN = {"PREFIXPACK_ONE_TOKEN_STEPS": "1"}
MIXED_CHUNK = ("--enable-mixed-chunk", "--chunked-prefill-size", "128")
NO_OVERLAP = "--disable-overlap-schedule"
TOLERANCE = 0.5  # of a token's logit in bf16, as in `test_life_cycle_on_gpu.py`


def check(done: Packing, *modes: str) -> None:
    """There were one-token steps of these modes; they ran packed, as decode steps."""
    assert all(done.one_token[mode] > 0 for mode in modes), done.one_token
    done.assert_packed("decode")
    assert done.steps["decode"] > done.one_token.total()


@pytest.mark.parametrize(
    ("arguments", "mode", "seeds"),
    [
        pytest.param(MIXED_CHUNK, "mixed", 2, id="mixed"),
        pytest.param((), "extend", 2, id="plain"),
        pytest.param((*MIXED_CHUNK, NO_OVERLAP), "mixed", 25, id="mixed, no overlap", marks=pytest.mark.slow),
        pytest.param((NO_OVERLAP,), "extend", 25, id="no overlap", marks=pytest.mark.slow),
    ],
)
def test_random_rollouts_in_a_small_pool(launch, rollout_on, arguments, mode, seeds):
    """With aborts, retractions and flushes. Without mixed chunk, a refill is a prefill of one token by itself."""
    conservative = ("--schedule-conservativeness", "0.01")
    with launch(BACKEND, *arguments, *conservative, pool_tokens=SMALL_POOL, environment=ONE_TOKEN | RETRACTS) as server:
        rollout = rollout_on(server)
        with packing(server) as done:
            rollout.run_until_retracted(seeds)
    check(done, mode)


def test_a_beam_search_on_a_cached_prompt_beside_one_token_steps(launch):
    """SGLang keeps the logits from which beams start in prefill steps only; the setting is on by default."""
    prompt, greedy = list(range(10, 70)), {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    with launch(BACKEND) as server, packing(server) as done:
        plain, beams, again = (
            json.loads(server.post("/generate", {"input_ids": prompt, "sampling_params": {**greedy, **more}}))
            for more in ({}, {"beam_width": 2}, {})
        )
    assert beams["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert len(beams["output_ids"]) == greedy["max_new_tokens"]
    assert again["output_ids"] == plain["output_ids"]
    assert done.one_token == {"extend": 1}


DRAFTS = ("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
TREES = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
VERIFY = {"PREFIXPACK_PACK_VERIFY": "1"}
ON_GPU = torch.cuda.is_available()
CUDA = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
DEVICE = "cuda" if ON_GPU else "cpu"


def is_begin(tokens: tuple[int, ...], outputs: set[tuple[int, ...]]) -> bool:
    """Whether longer tokens begin with these, and are judged with them."""
    return any(len(other) > len(tokens) and other[: len(tokens)] == tokens for other in outputs)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "settings", "mode"),
    [
        pytest.param(MIXED_CHUNK, ONE_TOKEN, "decode", id="overlap"),
        pytest.param((*MIXED_CHUNK, NO_OVERLAP), ONE_TOKEN, "decode", id="no overlap"),
        pytest.param(MIXED_CHUNK, ONE_TOKEN | {"PREFIXPACK_PACK_MIXED": "1"}, "mixed", id="packed mixed", marks=CUDA),
        pytest.param(DRAFTS, VERIFY, "verify", id="drafts", marks=CUDA),
        pytest.param(DRAFTS, {"PREFIXPACK_STOCK_BACKEND": "fa3"}, "verify", id="drafts by default", marks=CUDA),
        pytest.param(TREES, VERIFY, "verify", id="trees", marks=CUDA),
    ],
)
def test_fifty_schedules_judged_by_transformers(arguments, settings, mode):
    """In 16 bits the stock backend's own tokens depend on the batch, so fp32 logits judge them. Also without a GPU."""
    on_gpu = ("--dtype", "bfloat16", "--disable-prefill-cuda-graph", "--mem-fraction-static", "0.5")
    extra, stock = (on_gpu, {"PREFIXPACK_STOCK_BACKEND": "triton"}) if ON_GPU else ((), {})
    model = tiny_model("llama_gpu")
    draft = ("--speculative-draft-model-path", str(model), "--speculative-num-draft-tokens", "4")
    reference, prompts = Reference(model, DEVICE), life_cycle.prompts(Vocabulary(RESERVED_TOKENS, VOCABULARY))
    sizes = ("--max-total-tokens", "16384", "--context-length", "4096", "--max-running-requests", "12")
    extra = (*sizes, *arguments, *(draft if arguments is DRAFTS else ()), *extra)
    variables = {"PREFIXPACK_ROUTE": "packed"} | stock | settings
    options = ServerOptions(str(model), BACKEND, DEVICE, extra, variables)
    outputs = {prompt.name: set[tuple[int, ...]]() for prompt in prompts}
    with serve(options) as server, packing(server) as done:
        for seed in range(50):
            draw = random.Random(seed)
            requests = [
                dataclasses.replace(
                    draw.choice(prompts), max_new_tokens=draw.randint(1, 40), arrival_seconds=draw.uniform(0, 0.5)
                )
                for _ in range(20)
            ]
            server.flush_cache()
            for answer in replay(server.url, requests):
                outputs[answer.request.name].add(tuple(answer.samples[0].tokens))
            print(seed, end=" ", flush=True)
    assert done.one_token["mixed"] > 100 or mode == "verify", done.one_token
    assert done.steps[mode] > (100 if mode == "mixed" else max(100, done.one_token.total()))
    assert set(done.fallbacks) <= {"idle", "compute_bound"}
    tolerance = TOLERANCE if ON_GPU else SMALLEST_MARGIN
    for prompt in prompts:
        longest = [tokens for tokens in outputs[prompt.name] if not is_begin(tokens, outputs[prompt.name])]
        for tokens in longest:
            assert reference.deficits(prompt, list(tokens)).max() < tolerance, (prompt.name, tokens)
