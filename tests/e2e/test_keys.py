"""Who may read and do what on a real server with an ordinary API key and one for admins (docs/security.md)."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.demo.server import Server
from tests.e2e.conftest import BACKEND, Launch

pytestmark = pytest.mark.e2e

ORDINARY, ADMIN = "ORDINARY-KEY", "ADMIN-KEY"
KEYS = (None, ORDINARY, ADMIN)
POOL = 6144
PROMPTS = "/prefixpack/prompts"
# Every endpoint of ours. The bodies are refused with 400 or 404 once the key is accepted.
ADMINS = [
    *((method, "/prefixpack/pins") for method in ("GET", "POST", "DELETE")),
    *((method, "/prefixpack/abtest") for method in ("GET", "POST", "DELETE")),
    ("GET", PROMPTS),
]


@pytest.fixture(scope="module")
def server(launch: Launch) -> Iterator[Server]:
    environment = {
        "PREFIXPACK_FINGERPRINT_KEY": "a secret of operators", "PREFIXPACK_LIVE_TESTS": "1",
        "PREFIXPACK_PIN_BUDGET_PERCENT": "10", "PREFIXPACK_RETENTION": "reuse",
    }  # fmt: skip
    keys = ("--api-key", ORDINARY, "--admin-api-key", ADMIN)
    with launch(BACKEND, *keys, environment=environment, pool_tokens=POOL) as running:
        yield running


def ask(server: Server, path: str, key: str | None, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, data, headers, method=method), timeout=120
        ) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server: Server, tokens: list[int], new_tokens: int, **fields: Any) -> Any:
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0, **fields.pop("sampling", {})}
    body = {"input_ids": tokens, "sampling_params": sampling, **fields}
    return json.loads(ask(server, "/generate", ORDINARY, "POST", body)[1])


@pytest.mark.parametrize(("method", "path"), ADMINS)
def test_every_endpoint_of_ours_asks_for_the_admin_key(server: Server, method: str, path: str) -> None:
    body = None if method == "GET" else {"no such field": 1}
    statuses = [ask(server, path, key, method, body)[0] for key in KEYS]
    assert statuses[:2] == [401, 401]
    assert statuses[2] in ((200, 404) if method == "GET" else (400, 404))


def test_the_endpoints_of_the_test_are_all_that_the_server_has(server: Server) -> None:
    status, text = ask(server, "/openapi.json", ORDINARY)
    assert status == 200
    found = json.loads(text)["paths"]
    ours = {(method.upper(), path) for path in found if path.startswith("/prefixpack") for method in found[path]}
    assert ours == set(ADMINS)


def test_ordinary_keys_learn_nothing_of_the_prompts_that_run(server: Server, vocabulary: Any) -> None:
    """Neither hashes nor lengths nor who shares with whom; the admin key reads hashes."""
    prompt = vocabulary.tokens(1100, 61)  # two blocks and a partial one
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(generate, server, prompt, 1000, cache_salt=salt) for salt in ("one", "one", "another")]
        try:
            while True:
                told = json.loads(ask(server, PROMPTS, ADMIN)[1])["copies"][0]
                if len(told["prompts"]) == 3 and not told["pending"]:
                    break
                assert not any(answer.done() for answer in running)
                time.sleep(0.05)
            status, info = ask(server, "/server_info", ORDINARY)
            begin = time.monotonic()
            metrics = ask(server, "/metrics", None)[1]
            arguments = ["explain", "--server", server.url, "--server", server.url.replace("127.0.0.1", "localhost")]
            assert main([*arguments, "--api-key", ADMIN, "--json"]) == 0
            assert main([*arguments, "--api-key", ORDINARY, "--json"]) == 2
            assert time.monotonic() - begin < 60
        finally:
            ask(server, "/abort_request", ADMIN, "POST", {"abort_all": True})
            ask(server, "/abort_request", ORDINARY, "POST", {"abort_all": True})
    assert status == 200
    state = json.loads(info)["internal_states"][0]["prefixpack"]
    assert (state["batch"], state["tells_batch"]) == (None, False)
    assert {"running", "prompts"}.isdisjoint(state)
    assert sorted(len(prompt) for prompt in told["prompts"]) == [32] * 3  # the partial block has no hash
    assert len(set(told["prompts"])) == 2  # a salt is a namespace of its own
    for hashes in told["prompts"]:
        assert hashes[:16] not in info + metrics


def test_what_sglang_itself_shows_to_ordinary_keys(server: Server) -> None:
    """docs/security.md names it. Should SGLang mend it, the page is wrong."""
    info = json.loads(ask(server, "/server_info", ORDINARY)[1])
    assert (info["api_key"], info["admin_api_key"]) == (ORDINARY, ADMIN)


def test_a_place_in_a_job_takes_no_cached_token_from_others(server: Server, vocabulary: Any) -> None:
    """With retention on. Announcements are off, as they are by default."""
    system = vocabulary.tokens(600, 62)
    hostile = {"custom_params": {"prefixpack_offline": ["hostile", 0, 0, 1, 0, 0, 600, 1]}}
    cached = []
    for number in range(10):  # from the sixth on the pool is full
        answer = generate(server, [*system, 100 + number], 1)
        cached.append(answer["meta_info"]["cached_tokens"])
        generate(server, [*system, 200 + number], 1, sampling=hostile)
        generate(server, vocabulary.tokens(1000, 70 + number), 1)
    assert cached == [0] + [600] * 9
