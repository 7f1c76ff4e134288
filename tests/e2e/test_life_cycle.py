"""A rollout engine's life on the real server: tokens as stock, nothing left behind."""

from __future__ import annotations

import dataclasses
import http.client
import importlib.metadata
import json
import random
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import psutil
import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server, ServerError
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e.conftest import STOCK, WAYS, Launch, packing
from tests.e2e.life_cycle import LONGEST, Engine, other_weights, prompts, same_as, stock_tokens, update_from_disk

pytestmark = pytest.mark.e2e

Run = Callable[..., None]
VERSION = tuple(int(part) for part in importlib.metadata.version("sglang").split(".")[:3] if part.isdigit())
GONE = (ServerError, OSError, http.client.HTTPException, aiohttp.ClientError)
PINS = {"PREFIXPACK_PIN_BUDGET_PERCENT": "40", "PREFIXPACK_RETENTION": "reuse"}


@pytest.fixture(scope="module")
def run(
    stock_server: Server, model: Path, vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """run(server, seeds, calls, pins=False): a random sequence of calls for each seed."""
    models = (model, other_weights(model, tmp_path_factory.mktemp("other")))
    requests = prompts(vocabulary)
    first, second = stock_tokens(stock_server, requests, models)
    assert first != second
    judges = same_as(first), same_as(second)
    with ThreadPoolExecutor(64) as pool:

        def sequences(server: Server, seeds: range, calls: int, *, pins: bool = False) -> None:
            for seed in seeds:
                engine = Engine(server, requests, models, judges, pool, random.Random(seed), pins)
                try:
                    engine.live(calls)
                except BaseException as error:
                    error.add_note(f"seed {seed}: {', '.join(engine.done)}")
                    raise

        yield sequences


# Fewer than requests: one that waits takes the place of one that ends, in a batch of the same size.
FEW = ("--max-running-requests", "5")


@pytest.mark.parametrize(("way", "seeds"), [("name", range(5)), ("wrapped", range(5, 10))], ids=WAYS)
def test_some_random_sequences(way: str, seeds: range, launch: Launch, run: Run) -> None:
    backend, environment = WAYS[way]
    with launch(backend, *FEW, environment=environment) as server, packing(server, "decode", "extend"):
        run(server, seeds, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "first"), [("name", 1000), ("wrapped", 1100)], ids=WAYS)
def test_a_hundred_random_sequences(way: str, first: int, launch: Launch, run: Run, vocabulary: Vocabulary) -> None:
    """SGLang's idle check ends the scheduler if it misses KV slots or rows. The last request needs every KV slot."""
    pool = 1400  # small enough that requests are retracted and prefixes evicted between the calls
    arguments = ("--chunked-prefill-size", "128", *FEW)
    backend, environment = WAYS[way]
    with launch(backend, *arguments, pool_tokens=pool, environment=environment | PINS) as server:
        run(server, range(first, first + 20), 14, pins=True)
        before = scheduler_bytes(server)
        with packing(server, "decode", "extend"):
            run(server, range(first + 20, first + 100), 14, pins=True)
        release_pins(server)
        (whole_pool,) = replay(server.url, [Request("all", vocabulary.tokens(pool - 20, 23), 8)], timeout_seconds=60)
        assert whole_pool.samples[0].finish == "length", "a lock that is left keeps slots from it"
        assert scheduler_bytes(server) < before + 64 * 2**20


def release_pins(server: Server) -> None:
    """Releases what is pinned. Nothing is then."""
    address = f"{server.url}/prefixpack/pins"
    for pin in json.loads(server.get("/prefixpack/pins"))["schedulers"][0]["pins"]:
        body = json.dumps({"id": pin["id"]}).encode()
        urllib.request.urlopen(urllib.request.Request(address, body, method="DELETE"), timeout=30).close()
    (left,) = json.loads(server.get("/prefixpack/pins"))["schedulers"]
    assert left["pins"] == []
    assert left["pinned_tokens"] == 0


def scheduler_bytes(server: Server) -> int:
    """Resident memory of the scheduler, the largest process of the server's family."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return max(process.memory_info().rss for process in family)


@pytest.mark.slow
def test_stock_and_an_update_that_flushes_while_retracted_requests_wait(launch, model, vocabulary):
    """SGLang up to 0.5.20 does not survive it on its own, so the sequences leave it out."""
    request = dataclasses.replace(prompts(vocabulary)[0], max_new_tokens=20 * LONGEST)
    started = threading.Event()
    with launch(STOCK) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(replay, server.url, [request], on_token=lambda *token: started.set(), timeout_seconds=90)
        assert started.wait(60)
        server.post("/pause_generation", {"mode": "retract"})
        if VERSION >= (0, 5, 21):
            update_from_disk(server, model, flush=True)
            server.post("/continue_generation", {})
            assert running.result(60)
            return
        with pytest.raises(GONE):
            update_from_disk(server, model, flush=True)
        with pytest.raises(GONE):
            running.result(60)
        assert "Cache flush failed after updating weights" in server.log_text()
