"""Servers with speculative decoding: tokens of plain greedy decoding, from packed verify steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, Launch, Tokens, packing, tokens_of

pytestmark = pytest.mark.e2e

Expected = Callable[[Sequence[Request]], Tokens]
SHIMS = Path(__file__).parents[1] / "support" / "cpu_speculation"
STANDALONE = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(tiny_model()))


@pytest.fixture(scope="module")
def standalone(launch: Launch) -> Iterator[Server]:
    """The model is its own draft model, so most drafts are accepted: chains of four tokens."""
    import os

    search_path = os.pathsep.join(filter(None, [str(SHIMS), os.environ.get("PYTHONPATH")]))
    with launch(BACKEND, *STANDALONE, environment={"PYTHONPATH": search_path}) as server:
        yield server


@pytest.mark.parametrize("name", ["three_levels", "ragged"])
def test_chains(standalone: Server, expected: Expected, vocabulary: Vocabulary, name: str) -> None:
    requests = workloads.ALL[name](vocabulary)
    standalone.flush_cache()
    with packing(standalone) as done:
        answers = replay(standalone.url, requests)
    assert tokens_of(answers) == expected(requests)
    done.assert_packed("verify", "extend")
