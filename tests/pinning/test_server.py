"""Pins on the real server: asked for over HTTP, seen in the cache, and never in the way of requests."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.demo.server import Server, serve
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY
from tests.support import forked_server
from tests.support.pages import documented, run
from tests.support.word_model import WordServer, prompts_file, word_model

pytestmark = pytest.mark.e2e

POOL = 2048
PINS = "/prefixpack/pins"
LABELS = ("--extra-metric-labels", '{"cluster": "east"}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = WordServer(
        model=str(word_model(tmp_path_factory.mktemp("model") / "words")),
        backend="torch_native",
        extra=("--context-length", "2048", "--max-total-tokens", str(POOL), "--enable-metrics", *LABELS),
        environment={
            "PREFIXPACK_PIN_BUDGET_PERCENT": "100",
            "PREFIXPACK_RETENTION": "reuse",
        },
        log_folder=tmp_path_factory.mktemp("pins"),
        starter=forked_server.start_without_warm_up,
    )
    with serve(options) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty_cache(server: Server) -> None:
    server.flush_cache()


def ask(server: Server, method: str, body: object = None) -> tuple[int, dict[str, Any]]:
    """Status and answer of a request about pins."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + PINS, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def pins(server: Server) -> list[dict[str, Any]]:
    status, answer = ask(server, "GET")
    assert status == 200
    return list(answer["schedulers"][0]["pins"])


def prompt(first: int, length: int) -> list[int]:
    """Distinct prompts for distinct `first`."""
    span = VOCABULARY - RESERVED_TOKENS
    return [RESERVED_TOKENS + (first * 7919 + position * (first + 1)) % span for position in range(length)]


def generate(server: Server, tokens: list[int], new_tokens: int = 4) -> dict[str, Any]:
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True}}
    return dict(json.loads(server.post("/generate", body, timeout=120))["meta_info"])


def counters(server: Server) -> dict[str, int]:
    return dict(server.info()["internal_states"][0]["prefixpack_pinning"])


def test_a_prefix_is_pinned_listed_kept_and_released(server: Server) -> None:
    system = prompt(1, 600)
    status, answer = ask(server, "POST", {"token_ids": system, "label": "system prompt"})
    assert status == 200
    pin = answer["schedulers"][0]["pin"]
    assert (pin["tokens"], pin["cached_tokens"], pin["label"]) == (600, 0, "system prompt")
    generate(server, [*system, 11, 12, 13])
    assert pins(server) == [{**pin, "cached_tokens": 600}]
    for other in range(2, 8):  # more than the pool holds
        generate(server, prompt(other, 700))
    assert generate(server, [*system, 21, 22])["cached_tokens"] == 600
    assert "sglang:prefixpack_pinned_tokens{" in server.get("/metrics")
    status, answer = ask(server, "DELETE", {"token_ids": system})
    assert (status, answer["schedulers"][0]["released"], pins(server)) == (200, [pin["id"]], [])


def test_metrics_show_pins_at_once_with_the_labels_of_sglangs(server: Server) -> None:
    """An update after so many steps would come when the next requests run."""

    def metric(name: str) -> tuple[dict[str, str], float]:
        ((labels, value),) = re.findall(rf"^sglang:{name}{{(.*)}} (\S+)$", server.get("/metrics"), re.MULTILINE)
        return dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)

    for first in range(3):
        assert ask(server, "POST", {"token_ids": prompt(first, 100)})[0] == 200
    labels, made = metric("prefixpack_pins")
    assert made == 3
    assert metric("prefixpack_pinned_tokens")[1] == 300
    assert labels == metric("num_running_reqs")[0]
    assert labels["cluster"] == "east"
    for first in range(3):
        assert ask(server, "DELETE", {"token_ids": prompt(first, 100)})[0] == 200
    assert metric("prefixpack_pins")[1] == 0


def test_the_examples_of_the_pages(server: Server, tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path / "prompts.txt")
    files = {"http://HOST:PORT": server.url, "prompts.txt": prompts}
    pinned = documented("python examples/pins.py", files)
    assert "prompts.txt:2: 0 of 60 cached" in run(pinned)
    rollout = documented("python examples/rollout_client.py", files, "--max-new-tokens 4")
    assert re.match(r"32 samples, [\d,]+ output tokens/s, \d+% of prompt tokens cached", run(rollout))
    assert "prompts.txt:2: 60 of 60 cached" in run(pinned)
    files = {"http://host-r:30000": server.url, "prompts.txt": prompts}
    groups = documented("python examples/sglang_router.py", files, "--max-new-tokens 4")  # straight to an engine
    assert [len(json.loads(line)) for line in run(groups).splitlines()] == [16, 16]
    run(pinned.replace(" pin ", " release "))
    assert pins(server) == []


def test_the_curl_lines_of_the_page(server: Server) -> None:
    place = {"localhost:30000": server.url}
    post = documented('curl -X POST   localhost:30000/prefixpack/pins -d \'{"text"', place)
    (made,) = json.loads(run(post))["schedulers"]
    assert (made["pin"]["tokens"], made["pin"]["label"]) == (3, "system prompt")
    run(documented('curl -X POST   localhost:30000/prefixpack/pins -d \'{"token_ids"', place))
    (listed,) = json.loads(run(documented("curl           localhost:30000/prefixpack/pins", place)))["schedulers"]
    first, second = listed["pins"]
    assert (first, second["tokens"]) == (made["pin"], 3)
    by_id = documented('curl -X DELETE localhost:30000/prefixpack/pins -d \'{"id"', place)
    run(re.sub(r"\d{9,}", str(second["id"]), by_id))
    assert pins(server) == [first]
    run(documented('curl -X DELETE localhost:30000/prefixpack/pins -d \'{"text"', place))
    assert pins(server) == []


def test_with_the_whole_pool_pinned_the_server_keeps_serving(server: Server) -> None:
    for first in (1, 2, 3):
        generate(server, prompt(first, 640))
        status, _ = ask(server, "POST", {"token_ids": prompt(first, 640)})
        assert status == 200
    rest = POOL - 3 * 640
    assert ask(server, "POST", {"token_ids": prompt(4, rest)})[0] == 200
    assert sum(pin["tokens"] for pin in pins(server)) == POOL
    shed = counters(server)["pins_shed"]
    with ThreadPoolExecutor(12) as users:
        answers = list(users.map(lambda first: generate(server, prompt(first, 900), 32), range(10, 22)))
    assert [answer["completion_tokens"] for answer in answers] == [32] * 12
    after = counters(server)
    assert after["pins_shed"] > shed
    assert after["failures"] == 0
    # SGLang checks its accounting whenever it is idle and ends if slots are lost.
    server.flush_cache()
    assert server.get("/health_generate", timeout=60) is not None
    assert "leak" not in server.log_text()
