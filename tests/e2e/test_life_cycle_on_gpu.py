"""A rollout engine's life on a GPU whose memory is really released: graphs, KV and weights, in any order.

    python -m pytest -v -s -m gpu tests/e2e/test_life_cycle_on_gpu.py --results life_cycle.json
    python -m pytest -v -s -m gpu tests/e2e/test_life_cycle_on_gpu.py --results life_cycle.json -k wrapped

Needs torch_memory_saver. Two servers, one after the other: under our name, and in wrap mode under the name that SGLang
chooses. A failed sequence costs its server; the next sequence gets a new one. Tokens are judged by transformers in
fp32, because in 16 bits the stock backend's depend on the batch. The file has each sequence that passed, and the next
call of the same commit leaves those out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.provenance import git_commit, machine_name, package_versions
from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server, ServerOptions, log_tail, serve
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.demo.workload import Vocabulary
from tests.e2e.conftest import Packing, packing
from tests.e2e.life_cycle import TAGS, Engine, Judge, other_weights, prompts, update_from_disk
from tests.e2e.reference import Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("torch_memory_saver") is None, reason="needs torch_memory_saver"),
]

DEVICE = "cuda"
SEQUENCES, CALLS, RELEASES = 50, 14, 3
WARM = 10  # sequences after which the server's memory no longer grows
MOST_SERVERS = 4  # of one kind, until the rest of its sequences is given up
# How far a token's logit may be below the best one's. In bf16 on a CPU, transformers' tokens stay within 0.14. With an
# eighth of the prompt replaced, more than half of the tokens are more than 0.5 below.
TOLERANCE = 0.5
MIB = 2**20
POOL = 65536  # tokens; with two layers of two heads of 128 in bf16: 128 MiB
# SGLang's breakable graphs of prefill refuse a memory saver of graphs.
ARGUMENTS = ("--enable-memory-saver", "--dtype", "bfloat16", "--disable-prefill-cuda-graph")
SIZES = ("--max-total-tokens", str(POOL), "--context-length", "4096", "--max-running-requests", "64")
REQUESTS = prompts(Vocabulary(RESERVED_TOKENS, VOCABULARY))
KINDS = {"prefixpack": ("prefixpack", {}), "wrapped": (None, {"PREFIXPACK_WRAP": "1"})}


def environment() -> dict[str, str]:
    """Variables of the servers. The memory saver is preloaded, which needs the CUDA runtime on the loader's path."""
    torch.cuda.init()
    runtimes = re.findall(r"\s(/\S*)/libcudart\S*\n", Path("/proc/self/maps").read_text())
    path = ":".join([*dict.fromkeys(runtimes), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    variables = {"PREFIXPACK_ROUTE": "packed", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "HF_HUB_OFFLINE": "1"}
    return variables | ({"LD_LIBRARY_PATH": path} if path else {})


class Servers:
    """A server of one kind at a time, a new one after a failure.

    Attributes:
        sequences: that passed, by seed.
        done: steps of the last block.
    """

    def __init__(self, options: ServerOptions, kind: str, results: str | None) -> None:
        self._options, self._stack = options, contextlib.ExitStack()
        self._server: Server | None = None
        self._started = 0
        self._since = 0.0
        self._path = None if results is None else Path(results)
        origin = {"commit": git_commit(), "machine": machine_name(), "versions": package_versions()}
        self._results: dict[str, Any] = {**origin, "sequences": {}}
        if self._path is not None and self._path.exists():
            self._results = json.loads(self._path.read_text())
            assert {name: self._results[name] for name in origin} == origin, f"{results} has another origin"
        self.sequences: dict[str, dict[str, Any]] = self._results["sequences"].setdefault(kind, {})
        self.done: Packing

    def note(self, seed: int, calls: str, seconds: float) -> None:
        """A sequence that passed. The file knows its server by the time of the start."""
        self.sequences[str(seed)] = {
            "server": self._since, "free_bytes": free_bytes(), "seconds": round(seconds, 2),
            "steps": dict(self.done.steps), "fallbacks": dict(self.done.fallbacks), "calls": calls,
        }  # fmt: skip
        if self._path is not None:
            self._path.write_text(json.dumps(self._results, indent=1) + "\n")

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """The server, which ends if the block fails."""
        if self._server is None:
            if self._started == MOST_SERVERS:
                pytest.fail(f"not run: {MOST_SERVERS} servers failed before", pytrace=False)
            started, self._started = self._started, MOST_SERVERS  # the last one, if it does not start
            self._server = self._stack.enter_context(serve(self._options))
            self._started, self._since = started + 1, time.time()
        try:
            with packing(self._server) as self.done:
                yield self._server
        except BaseException as error:
            error.add_note(log_tail(self._server.log))
            self.close()
            raise

    def close(self) -> None:
        self._server = None
        self._stack.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model = tiny_model("llama_gpu")
    return model, other_weights(model, tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def judges(models: tuple[Path, Path]) -> tuple[Judge, Judge]:
    return near(Reference(models[0])), near(Reference(models[1]))


def near(reference: Reference) -> Judge:
    """Accepts tokens whose logits are near the best one's."""

    def judge(which: int, tokens: list[int]) -> None:
        if tokens:
            deficits = reference.deficits(REQUESTS[which], tokens)
            assert deficits.max() < TOLERANCE, f"prompt {which}, token {int(deficits.argmax())}: {deficits.max()}"

    return judge


@pytest.fixture(scope="module", params=list(KINDS))
def servers(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> Iterator[Servers]:
    backend, variables = KINDS[request.param]
    made = Servers(
        ServerOptions(
            model=str(models[0]),
            backend=backend,
            device=DEVICE,
            extra=(*ARGUMENTS, *SIZES, "--cuda-graph-max-bs-decode", "64"),
            environment=environment() | variables,
            start_seconds=180.0,
        ),
        request.param,
        request.config.getoption("results"),
    )
    yield made
    made.close()


@pytest.mark.parametrize(
    ("tags", "least"),
    [(["weights"], 0), (["cuda_graph"], 0), (["kv_cache", "cuda_graph"], 128 * MIB), (list(TAGS), 128 * MIB)],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_a_steady_group_after_a_release(servers, models, judges, tags, least):
    """The same requests before and after, so that plans and graphs are those from before the release."""
    with servers.running() as server:
        for _ in range(2):
            for which, answer in enumerate(replay(server.url, REQUESTS, timeout_seconds=60)):
                judges[0](which, answer.samples[0].tokens)
            server.flush_cache()
            before = free_bytes()
            server.post("/release_memory_occupation", {"tags": tags}, 60)
            released = free_bytes() - before
            server.post("/resume_memory_occupation", {"tags": tags}, 60)
            if "weights" in tags:
                update_from_disk(server, models[0], flush=False)
            print(f"released {released / MIB:.0f} MiB", end=" ", flush=True)
            assert released > least, "nothing was unmapped"


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_random_sequence_with_released_memory(servers, models, judges, seed):
    if str(seed) in servers.sequences:
        pytest.skip("passed before, by the file of results")
    start = time.monotonic()
    with ThreadPoolExecutor(64) as pool, servers.running() as server:
        engine = Engine(server, REQUESTS, models, judges, pool, random.Random(seed), releases=RELEASES)
        try:
            engine.live(CALLS)
            server.flush_cache()
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(engine.done)}")
            raise
    seconds, calls = time.monotonic() - start, ", ".join(engine.done)
    servers.note(seed, calls, seconds)
    print(f"{seconds:.1f} s, released {', '.join(releases(calls)) or 'nothing'}", end=" ", flush=True)


def releases(calls: str) -> list[str]:
    """The tags of each release of memory."""
    return re.findall(r"release\((.*?)\)", calls)


def test_what_the_sequences_were(servers: Servers) -> None:
    """After the sequences: all kinds of memory were released, decode steps ran packed, and nothing leaked."""
    passed = list(servers.sequences.values())
    released = Counter(tags for one in passed for tags in releases(one["calls"]))
    steps, fallbacks = (sum((Counter(one[name]) for one in passed), Counter()) for name in ("steps", "fallbacks"))
    print(f"{len(passed)} sequences, {dict(released)}, steps {dict(steps)}, fallbacks {dict(fallbacks)}")
    assert {tag for tags in released for tag in tags.split("+")} == set(TAGS)
    assert released.total() >= SEQUENCES // 2
    assert steps["decode"] > SEQUENCES
    assert set(fallbacks) <= {"idle", "compute_bound"}
    for server in {one["server"] for one in passed}:
        free = [one["free_bytes"] for one in passed if one["server"] == server]
        assert len(free) <= WARM or free[-1] > free[WARM - 1] - 64 * MIB
