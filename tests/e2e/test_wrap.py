"""Wrap mode on real servers: the stock backend's name, or none, its tokens, and packed steps, however they start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import ServerOptions
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import POOL_TOKENS, STOCK, Launch, Tokens, packing, tokens_of

pytestmark = pytest.mark.e2e

Expected = Callable[[Sequence[Request]], Tokens]
WRAP = {"PREFIXPACK_WRAP": "1"}
TIMEOUT_SECONDS = 300


def test_launch_server_with_the_stock_backends_name(launch: Launch, expected: Expected, vocabulary: Vocabulary) -> None:
    requests = workloads.three_levels(vocabulary)
    with launch(STOCK, environment=WRAP) as server:
        replay(server.url, workloads.level_seeds(requests))
        with packing(server) as done:
            answers = replay(server.url, requests)
        info, state = server.info(), server.packing_state()
        metrics, log = server.get("/metrics"), server.log_text()
    assert tokens_of(answers) == expected(requests)
    done.assert_packed("decode", "extend")
    assert info["attention_backend"] == STOCK
    assert state is not None
    assert state["wrapped"] == [STOCK]
    assert f'stock_backend="{STOCK}"' in next(
        line for line in metrics.splitlines() if line.startswith("sglang:prefixpack_wrapped{")
    )
    assert log.count(f"prefixpack: {STOCK} runs wrapped") == 1


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("engine", None),
        ("slime", STOCK),
        ("verl", STOCK),
        pytest.param("areal", STOCK, marks=pytest.mark.slow),
    ],
)
def test_other_launchers(
    way: str, backend: str | None, model: Path, expected: Expected, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    requests = workloads.three_levels(vocabulary)[:6]
    (length,) = {request.max_new_tokens for request in requests}
    arguments = {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "max_total_tokens": POOL_TOKENS,
        "sleep_on_idle": True,
        "log_level": "warning",
        **({"attention_backend": backend} if backend else {}),
    }
    task = tmp_path / "task.json"
    prompts = [list(request.prompt) for request in requests]
    task.write_text(json.dumps({"arguments": arguments, "prompts": prompts, "max_new_tokens": length}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.launchers", way, str(task)],
        env={**ServerOptions("", None).full_environment(), **WRAP},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [[tokens] for tokens in result["tokens"]] == expected(requests)
    (state,) = result["states"]
    assert state["attention_backend"] == STOCK
    assert state["prefixpack"]["wrapped"] == [STOCK]
    assert state["prefixpack"]["counters"]["steps_packed"]["decode"] > 0
