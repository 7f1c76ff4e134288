"""Real servers for the end-to-end tests. Tests share them, because a start takes seconds (see `forked_server`).

All tests compare with one `torch_native` server with SGLang's default schedule. Greedy tokens do not depend on the
schedule of the server under test. `test_reference.py` checks the `torch_native` server itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.demo.client import Answer, Sample, replay
from sgl_prefix_attn.demo.comparison import KVReads
from sgl_prefix_attn.demo.server import Server, ServerOptions, serve
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import workloads
from tests.e2e.rollout import Rollout
from tests.support import forked_server

BACKEND = "prefixpack"
STOCK = "torch_native"
WRAP = {"PREFIXPACK_WRAP": "1"}
# How a server gets our backend: by its name and variables.
WAYS = {"name": (BACKEND, {}), "wrapped": (STOCK, WRAP)}
CONTEXT_LENGTH = 4096
POOL_TOKENS = 16384
# Such steps read no KV twice, so there is nothing to pack.
NOTHING_TO_PACK = {"idle"}

Tokens = list[list[list[int]]]  # of each request, of each sample
Expected = Callable[[Sequence[Request]], Tokens]  # tokens of the stock backend


def tokens_of(answers: Sequence[Answer]) -> Tokens:
    return [[sample.tokens for sample in answer.samples] for answer in answers]


def replay_while_decoding(url: str, decoding: Sequence[Request], late: Sequence[Request]) -> list[Answer]:
    """Sends `late` once every request of `decoding` has four tokens, so that prefill meets decode."""
    started = {request.name: threading.Event() for request in decoding}

    def note(request: Request, sample: Sample) -> None:
        if len(sample.tokens) >= 4:
            started[request.name].set()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(replay, url, decoding, on_token=note)
        assert all(event.wait(60) for event in started.values())
        second = replay(url, late)
        return [*first.result(), *second]


@dataclasses.dataclass
class Packing:
    """What the server reports about the steps between two moments."""

    steps: Counter[str]
    fallbacks: Counter[str]
    one_token: Counter[str]
    kv: KVReads | None = None

    def assert_packed(self, *modes: str) -> None:
        """Steps of all these modes ran packed and read less KV, and no step fell back that had anything to pack."""
        assert {mode for mode in modes if self.steps[mode] == 0} == set()
        assert self.kv is not None
        assert self.kv.unique <= self.kv.read < self.kv.per_request
        assert set(self.fallbacks) <= NOTHING_TO_PACK


def state_of(server: Server) -> dict[str, Any]:
    state = server.packing_state()
    assert state is not None, "the server does not report prefixpack's state"
    return state


@contextlib.contextmanager
def packing(server: Server, *modes: str) -> Iterator[Packing]:
    """Yields a Packing that describes the steps of the block once the block ends; those of these modes ran packed."""
    before = state_of(server)
    result = Packing(Counter(), Counter(), Counter())
    yield result
    after = state_of(server)
    names = {"steps": "steps_packed", "fallbacks": "fallbacks", "one_token": "one_token_steps"}
    for field, name in names.items():
        getattr(result, field).update(Counter(after["counters"][name]) - Counter(before["counters"][name]))
    result.kv = KVReads.between(before, after)
    if modes:
        result.assert_packed(*modes)


def replay_cached(server: Server, requests: Sequence[Request], *modes: str) -> tuple[list[Answer], Packing]:
    """Sends requests whose shared parts are brought into the cache before; see `level_seeds` and `packing`."""
    replay(server.url, workloads.level_seeds(requests))
    with packing(server, *modes) as done:
        return replay(server.url, requests), done


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(RESERVED_TOKENS, VOCABULARY)


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model()


Launch = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def launch(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch(backend, *arguments, model=..., environment=..., pool_tokens=...): a server as a context manager."""
    usual_model = model

    def start(
        backend: str,
        *extra: str,
        model: Path = usual_model,
        environment: dict[str, str] | None = None,
        pool_tokens: int = POOL_TOKENS,
    ) -> contextlib.AbstractContextManager[Server]:
        sizes = ("--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", str(pool_tokens))
        options = ServerOptions(
            model=str(model), backend=backend, environment=environment or {},
            extra=(*sizes, "--max-running-requests", "64", "--enable-metrics", *extra),
            log_folder=tmp_path_factory.mktemp("server"), starter=forked_server.start_without_warm_up,
        )  # fmt: skip
        return serve(options)

    return start


def compared(
    launch: Launch, workload: Sequence[list[Request]], *extra: str, ways: Sequence[str] = ("name",), **options: Any
) -> list[tuple[Any, ...]]:
    """Compares the tokens of a stock server and of ours: for each way, what it packed, its state, and its log."""
    tokens, found = [], []
    for way in ("stock", *ways):
        backend, environment = WAYS.get(way, (STOCK, {}))
        with launch(backend, *extra, environment=environment, **options) as server:
            replay(server.url, workloads.level_seeds(workload[0]))
            with packing(server, "decode", "extend") if way in WAYS else contextlib.nullcontext() as done:
                tokens.append([tokens_of(replay(server.url, requests)) for requests in workload])
            found.append((done, server.packing_state(), server.log_text()))
        assert tokens[-1] == tokens[0], way
    return found[1:]


@pytest.fixture(scope="session")
def stock_server(launch: Launch) -> Iterator[Server]:
    with launch(STOCK) as server:
        yield server


@pytest.fixture(scope="session")
def packed(launch: Launch) -> Iterator[Server]:
    """The backend under test, with SGLang's default schedule."""
    with launch(BACKEND) as server:
        yield server


@pytest.fixture(scope="session")
def expected(stock_server: Server) -> Expected:
    """Tokens that the stock backend generates for requests, computed once per session."""
    known: dict[tuple[Request, ...], Tokens] = {}

    def ask(requests: Sequence[Request]) -> Tokens:
        at_once = tuple(dataclasses.replace(request, arrival_seconds=0.0) for request in requests)
        if at_once not in known:
            known[at_once] = tokens_of(replay(stock_server.url, at_once))
        return known[at_once]

    return ask


@pytest.fixture
def rollout_on(expected: Expected, vocabulary: Vocabulary) -> Callable[[Server], Rollout]:
    """rollout_on(server): random rollouts on the prompts of `workloads.refills`."""
    prompts = workloads.refills(vocabulary)
    stock = {request.prompt: samples[0] for request, samples in zip(prompts, expected(prompts), strict=True)}
    return lambda server: Rollout(server, stock, prompts)
