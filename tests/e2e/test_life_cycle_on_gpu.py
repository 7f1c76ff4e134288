"""A rollout engine's life on a GPU whose memory is really released: graphs, KV and weights, in any order.

    python -m pytest -q -m gpu tests/e2e/test_life_cycle_on_gpu.py

Tokens are judged by transformers in fp32, because in 16 bits the stock backend's depend on the batch.
"""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server, ServerOptions, serve
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e.conftest import packing
from tests.e2e.life_cycle import TAGS, Engine, Judge, other_weights, prompts
from tests.e2e.reference import Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("torch_memory_saver") is None, reason="needs torch_memory_saver"),
]

SEQUENCES = 50
# How far a token's logit may be below the best one's. In bf16 on a CPU, transformers' tokens stay within 0.14. With an
# eighth of the prompt replaced, more than half of the tokens are more than 0.5 below.
TOLERANCE = 0.5
RELEASED_BYTES = 64 * 2**20  # at least, by all tags
ENVIRONMENT = {"PREFIXPACK_ROUTE": "packed", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
ARGUMENTS = ("--enable-memory-saver", "--max-total-tokens", "16384", "--context-length", "4096")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model = tiny_model("llama_gpu")
    return model, other_weights(model, tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module", params=["prefixpack", "wrapped"])
def server(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> Iterator[Server]:
    """A server under our name, and one in wrap mode under the name that SGLang chooses."""
    wrapped = request.param == "wrapped"
    options = ServerOptions(
        model=str(models[0]),
        backend=None if wrapped else "prefixpack",
        device="cuda",
        extra=(*ARGUMENTS, "--dtype", "bfloat16", "--max-running-requests", "64"),
        environment=ENVIRONMENT | ({"PREFIXPACK_WRAP": "1"} if wrapped else {}),
    )
    with serve(options) as started:
        yield started


def near(reference: Reference, requests: list[Request]) -> Judge:
    """Accepts tokens whose logits are near the best one's."""

    def judge(which: int, tokens: list[int]) -> None:
        if tokens:
            assert reference.deficits(requests[which], tokens).max() < TOLERANCE

    return judge


def test_random_sequences_with_released_memory(server: Server, models: tuple[Path, Path]) -> None:
    requests = prompts(Vocabulary(RESERVED_TOKENS, VOCABULARY))
    judges = near(Reference(models[0]), requests), near(Reference(models[1]), requests)
    calls: Counter[str] = Counter()
    with ThreadPoolExecutor(64) as pool, packing(server) as done:
        for seed in range(SEQUENCES):
            engine = Engine(server, requests, models, judges, pool, random.Random(seed))
            try:
                engine.live(14)
            except BaseException as error:
                error.add_note(f"seed {seed}: {', '.join(engine.done)}")
                raise
            calls.update(engine.done)
    assert calls["release"] > SEQUENCES // 4
    assert done.steps["decode"] > 0
    assert done.kv is not None
    assert done.kv.read < done.kv.per_request
    assert set(done.fallbacks) <= {"no_cached_prefix", "idle", "compute_bound", "disabled"}


@pytest.mark.parametrize("tags", [["cuda_graph"], ["kv_cache", "cuda_graph"], list(TAGS)], ids="+".join)
def test_a_steady_group_after_a_release(server: Server, models: tuple[Path, Path], tags: list[str]) -> None:
    """The same requests before and after, so that plans and graphs are those from before the release."""
    requests = prompts(Vocabulary(RESERVED_TOKENS, VOCABULARY))
    judge = near(Reference(models[0]), requests)
    for _ in range(2):
        for which, answer in enumerate(replay(server.url, requests)):
            judge(which, answer.samples[0].tokens)
        server.flush_cache()
        before, _ = torch.cuda.mem_get_info()
        server.post("/release_memory_occupation", {"tags": tags})
        released = torch.cuda.mem_get_info()[0] - before
        server.post("/resume_memory_occupation", {"tags": tags})
        if "weights" in tags:
            server.post("/update_weights_from_disk", {"model_path": str(models[0])})
        assert released > (RELEASED_BYTES if len(tags) == len(TAGS) else 0), "nothing was unmapped"
