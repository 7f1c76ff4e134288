"""KV hints and sessions on a real server, by the cached tokens that its answers name. SGLang 0.5.23 and later."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Vocabulary
from sgl_prefix_attn.sglang_plugin.compat import versions
from tests.e2e.conftest import STOCK, Launch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not versions.has_kv_hints(), reason="requests of this SGLang carry no hints"),
]
POOL = 2048
RANGES = {"scope": None, "directives": [{"start": 0, "end": None, "priority": 90, "duration": 600}]}
# As Dynamo's session policy writes them.
DYNAMO = {"execute_at": "request_completion", "include_current_request": True, "block_hashes": ["11", "12"]}
KEPT = {**DYNAMO, "priority": 90, "ttl_seconds": 600.0}


@pytest.fixture(scope="module")
def running(launch: Launch) -> Iterator[Server]:
    environment = {"PREFIXPACK_HINT_BUDGET_PERCENT": "25", "PREFIXPACK_RETENTION_BLOCK": "16"}
    with launch(STOCK, environment=environment, pool_tokens=POOL) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    post(running, "/flush_cache", {})
    return running


def post(server: Server, path: str, body: Any) -> tuple[int, str]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def hints(kind: str, payload: Any, version: str = "1.0") -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def generate(server: Server, tokens: list[int], new_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
    status, text = post(server, "/generate", {"input_ids": tokens, "sampling_params": sampling, **fields})
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def cached(server: Server, tokens: list[int], **fields: Any) -> int:
    return int(generate(server, tokens, **fields)["meta_info"]["cached_tokens"])


def flood(server: Server, vocabulary: Vocabulary, tokens: int, first: int, **fields: Any) -> None:
    for number in range(tokens // 200):
        generate(server, vocabulary.tokens(200, first + number), **fields)


def counters(server: Server) -> dict[str, int]:
    with urllib.request.urlopen(server.url + "/server_info", timeout=60) as answer:
        state = json.load(answer)["internal_states"][0]
    return dict(state.get("prefixpack_pinning", {}))


def test_ordinary_requests_wake_nothing(server: Server, vocabulary: Vocabulary) -> None:
    """The first test of the module: nobody has sent a hint yet."""
    flood(server, vocabulary, 4000, 7000)
    assert "hints_executed" not in counters(server)


@pytest.mark.parametrize("payload", [RANGES, KEPT], ids=["ranges", "dynamo"])
def test_a_hint_keeps_a_prefix_that_the_oldest_go_before(server: Server, vocabulary: Vocabulary, payload: Any) -> None:
    mine, other = vocabulary.tokens(300, 1), vocabulary.tokens(300, 2)
    generate(server, mine, kv_hints=hints("kv.retain", payload))
    generate(server, other)
    flood(server, vocabulary, 4000, 100)
    assert 288 <= cached(server, mine) <= 299  # whole blocks
    assert cached(server, other) == 0
    assert counters(server)["retained_tokens"] == 288
    generate(server, mine, kv_hints=hints("kv.evict", DYNAMO))  # takes it back
    assert counters(server)["retained_tokens"] == 0
    flood(server, vocabulary, 4000, 200)
    assert cached(server, mine) == 0


def test_a_hint_lapses_although_nobody_sends_another(server: Server, vocabulary: Vocabulary) -> None:
    generate(server, vocabulary.tokens(300, 3), kv_hints=hints("kv.retain", {**KEPT, "ttl_seconds": 0.5}))
    time.sleep(1)
    flood(server, vocabulary, 4000, 300)
    assert cached(server, vocabulary.tokens(300, 3)) == 0


def test_malformed_hints_are_refused_and_unknown_ones_ignored(server: Server, vocabulary: Vocabulary) -> None:
    tokens = vocabulary.tokens(50, 4)
    sampling = {"max_new_tokens": 1}
    for wrong in (
        {"protocol_version": "0.1"},
        hints("kv.retain", {"directives": [{"priority": 1000}]}),
        hints("kv.retain", {**KEPT, "ttl_seconds": -1}),
    ):
        status, text = post(server, "/generate", {"input_ids": tokens, "sampling_params": sampling, "kv_hints": wrong})
        assert (status, "kv_hints" in text) == (400, True), text
    before = counters(server).get("hints_ignored", 0)
    for kind, version in (("kv.fetch", "1.0"), ("kv.demote", "1.0"), ("kv.retain", "9.0"), ("prefixpack.hints", "1.0")):
        generate(server, tokens, kv_hints=hints(kind, {"now": 1e300, "ends": True}, version))
    assert counters(server)["hints_ignored"] == before + 4
    assert counters(server)["failures"] == 0


def test_a_superseded_turn_goes_before_older_prefixes_and_the_live_one_stays(
    server: Server, vocabulary: Vocabulary
) -> None:
    older, prompt = vocabulary.tokens(300, 5), vocabulary.tokens(300, 6)
    generate(server, older)
    thought = generate(server, prompt, 400, session_id="agent 1")["output_ids"]
    follow_up = [*prompt, *vocabulary.tokens(100, 8)]
    generate(server, follow_up, session_id="agent 1")
    flood(server, vocabulary, 1200, 400)
    assert cached(server, older) == 299
    assert cached(server, [*follow_up, 1, 2]) >= 400
    assert cached(server, [*prompt, *thought]) < 600
    assert counters(server)["failures"] == 0


@pytest.mark.parametrize("way", ["close_session", "kv.deref"])
def test_an_ended_session_goes_before_older_prefixes(server: Server, vocabulary: Vocabulary, way: str) -> None:
    older, mine = vocabulary.tokens(300, 11), vocabulary.tokens(600, 12)
    generate(server, older)
    if way == "kv.deref":
        generate(server, mine, session_id="agent 2", kv_hints=hints("kv.deref", {}))
    else:
        generate(server, mine, session_id="agent 2")
        assert post(server, "/close_session", {"session_id": "agent 2"})[0] == 200
    flood(server, vocabulary, 1600, 600)
    assert cached(server, older) == 299
    assert cached(server, mine) < 400
    assert counters(server)["failures"] == 0


def test_hints_of_one_tenant_take_no_cached_token_from_another(server: Server, vocabulary: Vocabulary) -> None:
    """B's cached tokens with A's hints are those without them: B's prefix is in use, and A keeps a quarter at most."""
    mine = vocabulary.tokens(300, 9)

    def run(hostile: bool) -> list[int]:
        post(server, "/flush_cache", {})
        found = []
        for number in range(8):
            found.append(cached(server, [*mine, 6 + number], cache_salt="b", session_id="of b"))
            more: dict[str, Any] = {"session_id": "of b"} if hostile else {}
            for part in range(4):
                kinds = [hints("kv.retain", KEPT), hints("kv.evict", DYNAMO), hints("kv.retain", RANGES), None]
                more |= {"kv_hints": kinds[part]} if hostile else {}
                generate(server, vocabulary.tokens(250, 500 + 10 * number + part), cache_salt="a", **more)
            if hostile:
                post(server, "/close_session", {"session_id": "of b"})
        return found

    assert run(hostile=True) == run(hostile=False) == [0] + [300] * 7
    assert counters(server)["failures"] == 0
