"""Fingerprints of running prompts: what they tell, to whom, and what they cost the scheduler."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from sgl_prefix_attn.explain.spread import RunningPrompts as ToldPrompts
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state, running_prompts, server_info
from sgl_prefix_attn.sglang_plugin.backend.running_prompts import BLOCK, RunningPrompts
from tests.sglang_plugin.fixture import Fixture
from tests.support.schedulers import TokenizerManager

SECRET = "a secret of operators"
PATHS: list[Any] = [[(1, 0, 20)], [(1, 0, 20)]]


class Request:
    """What is read of SGLang's `Req`; unlike a SimpleNamespace it can be a key, as `Req` can."""

    def __init__(self, tokens: Any, *, ended: bool = False, decodes: bool = True, **namespace: str) -> None:
        self.origin_input_ids = tokens
        self.output_ids = [7] * decodes
        self.extra_key, self.cache_salt = namespace.get("extra_key"), namespace.get("cache_salt")
        self.finished = lambda: ended


def batch(*lengths: int, **kind: bool) -> Any:
    return SimpleNamespace(reqs=[Request([1] * length, **kind) for length in lengths])


def told(*requests: Request, key: str = SECRET) -> list[list[str]]:
    """The hashes of each request's prompt."""
    return ToldPrompts.model_validate(RunningPrompts(key).state(requests)).hashes()


def running(scheduler: Any, request_id: str | None = running_prompts.COMMAND) -> Any:
    """Blocks of the prompts that a scheduler tells; None: it tells none."""
    result = SimpleNamespace(internal_state={})
    server_info.after_get_internal_state(result, scheduler, SimpleNamespace(rid=request_id))
    found = result.internal_state.get(running_prompts.ANSWER_KEY)
    return None if found is None else [len(prompt) for prompt in ToldPrompts.model_validate(found).hashes()]


def test_equal_blocks_have_equal_hashes_and_partial_ones_have_none() -> None:
    shared = list(range(2 * BLOCK))
    one, longer, other, short = told(
        Request(array("q", shared)), Request([*shared, 7]), Request([5, *shared]), Request(shared[: BLOCK - 1])
    )
    assert (len(one), one) == (2, longer)
    assert len({*one, *other}) == 4
    assert short == []


def test_another_namespace_or_secret_has_other_hashes() -> None:
    tokens = list(range(BLOCK))
    pairs = ({}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "a"}, {"extra_key": "aa"})
    requests = [Request(tokens, **pair) for pair in pairs]
    hashes = {name for key in (SECRET, SECRET + "!") for prompt in told(*requests, key=key) for name in prompt}
    assert len(hashes) == 2 * len(pairs)
    assert told(requests[0]) == told(requests[0])  # two servers with one secret


def test_prompts_are_hashed_some_blocks_an_answer_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_prompts, "BLOCKS_AN_ANSWER", 3)
    requests = [Request(array("q", range(number, number + 2 * BLOCK))) for number in range(3)]
    prompts = RunningPrompts(SECRET)
    answers = [prompts.state(requests) for _ in range(3)]
    assert [answer["pending"] for answer in answers] == [2, 0, 0]
    assert [len(prompt) // 16 for prompt in answers[0]["prompts"]] == [2, 1, 0]
    assert answers[1] == answers[2]
    assert ToldPrompts.model_validate(answers[2]).hashes() == [told(request)[0] for request in requests]
    del requests
    assert len(prompts._known) == 0


def test_a_thousand_long_prompts_take_no_more_than_ten_milliseconds_an_answer_and_a_megabyte() -> None:
    tokens = array("q", range(1 << 15))
    requests = [Request(tokens, cache_salt=str(number)) for number in range(1100)]
    prompts, times = RunningPrompts(SECRET), []
    while True:
        begin = time.process_time()
        answer = prompts.state(requests)
        times.append(time.process_time() - begin)
        if not answer["pending"]:
            break
    assert len(times) == 1024 * 64 // running_prompts.BLOCKS_AN_ANSWER
    assert sorted(times)[len(times) // 2] < 0.010
    assert sum(map(len, answer["prompts"])) == 1024 * 64 * 16


class TestScheduler:
    @pytest.fixture(autouse=True)
    def _state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Fixture(PATHS, [30, 27])
        state = plugin_state.active()
        assert state is not None
        monkeypatch.setattr(state, "settings", Settings(fingerprint_key=SECRET, metrics=False))

    def test_all_microbatches_of_a_pipeline_run_and_ended_requests_do_not(self) -> None:
        microbatches = [batch(BLOCK), batch(2 * BLOCK, 3 * BLOCK), batch(4 * BLOCK, ended=True)]
        scheduler = SimpleNamespace(running_mbs=microbatches, mbs=[None, microbatches[1], None])
        assert running(scheduler) == [1, 2, 3]

    def test_requests_that_a_mixed_step_took_along_run(self) -> None:
        """SGLang leaves an empty running batch behind until the next step. A prompt's first chunk decodes nothing."""
        mixed = SimpleNamespace(reqs=[*batch(BLOCK, 2 * BLOCK).reqs, *batch(3 * BLOCK, decodes=False).reqs])
        for scheduler in (
            SimpleNamespace(running_batch=batch(), last_batch=mixed),
            SimpleNamespace(running_mbs=[batch(), batch()], mbs=[None, mixed]),
        ):
            assert running(scheduler) == [1, 2]

    @pytest.mark.parametrize("request_id", [None, "", "prefixpack-prompts:", "prefixpack-pins:{}"])
    def test_no_other_request_for_the_state_gets_them(self, request_id: str | None) -> None:
        assert running(SimpleNamespace(running_batch=batch(BLOCK), last_batch=None), request_id) is None

    def test_without_a_secret_nothing_is_hashed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugin_state.active(), "settings", Settings(metrics=False))
        monkeypatch.setattr(RunningPrompts, "state", lambda *arguments: pytest.fail("hashed"))
        assert running(SimpleNamespace(running_batch=batch(BLOCK), last_batch=None)) is None


@pytest.mark.parametrize(
    ("keys", "statuses"),
    [
        ({}, (403, 403, 403)),
        ({"api_key": "ORDINARY"}, (403, 403, 403)),
        ({"admin_api_key": "ADMIN"}, (401, 401, 200)),
        ({"api_key": "ORDINARY", "admin_api_key": "ADMIN"}, (401, 401, 200)),
    ],
)
def test_only_the_admin_key_reads_them(keys: dict[str, str], statuses: tuple[int, ...]) -> None:
    app = fastapi.FastAPI()
    manager = TokenizerManager(lambda request: [{running_prompts.ANSWER_KEY: RunningPrompts(SECRET).state([])}])
    running_prompts.add_route(app, lambda: manager)
    add_api_key_middleware(app, api_key=keys.get("api_key"), admin_api_key=keys.get("admin_api_key"))
    headers = ({}, {"Authorization": "Bearer ORDINARY"}, {"Authorization": "Bearer ADMIN"})
    answers = [TestClient(app).get(running_prompts.PATH, headers=header) for header in headers]
    assert tuple(answer.status_code for answer in answers) == statuses
    if statuses[-1] == 200:
        assert ToldPrompts.model_validate(answers[-1].json()["copies"][0]).prompts == []


def test_schedulers_that_know_nothing_of_them_are_named() -> None:
    app = fastapi.FastAPI()
    running_prompts.add_route(app, lambda: TokenizerManager(lambda request: [{}]))
    answer = TestClient(app).get(running_prompts.PATH)
    assert answer.status_code == 503
    assert "no fingerprint_key" in answer.json()["error"]["message"]
