"""The HTTP endpoint without a server behind them: what is sent to the schedulers, and how answers come back."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient  # noqa: E402

from sgl_prefix_attn.sglang_plugin.pinning import client as pinning_client  # noqa: E402
from sgl_prefix_attn.sglang_plugin.pinning import commands  # noqa: E402
from tests.support.schedulers import TokenizerManager  # noqa: E402


class Manager(TokenizerManager):
    """Gives these answers to the first command, then `later`; keeps the commands."""

    def __init__(self, *answers: dict[str, Any], later: list[dict[str, Any]] | None = None) -> None:
        super().__init__(self._answer)
        self.first, self.later = list(answers), later
        self.commands: list[dict[str, Any]] = []
        self.tokenizer: Any = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])

    def _answer(self, request: Any) -> list[dict[str, Any]]:
        self.commands.append(json.loads(request.rid.removeprefix(commands.ID_PREFIX)))
        return self.first if self.later is None or len(self.commands) == 1 else self.later


def client(manager: Manager) -> TestClient:
    app = fastapi.FastAPI()
    pinning_client.add_routes(app, lambda: manager)
    return TestClient(app)


def answer(**fields: Any) -> dict[str, Any]:
    return {commands.ANSWER_KEY: fields}


def test_text_becomes_tokens_and_every_scheduler_answers() -> None:
    manager = Manager(answer(pinned_tokens=2), answer(pinned_tokens=2))
    response = client(manager).post(pinning_client.PATH, json={"text": "ab", "ttl_steps": 5})
    assert (response.status_code, response.json()) == (200, {"schedulers": [{"pinned_tokens": 2}] * 2})
    assert manager.commands == [{"command": "pin", "token_ids": [97, 98], "ttl_steps": 5, "label": ""}]


@pytest.mark.parametrize(("kind", "status"), [("budget", 409), ("invalid", 400)])
def test_what_all_schedulers_refuse_is_refused(kind: str, status: int) -> None:
    manager = Manager(*[answer(error={"kind": kind, "message": "too much"})] * 2)
    response = client(manager).post(pinning_client.PATH, json={"token_ids": [1]})
    assert response.status_code == status
    assert response.json() == {"error": {"kind": kind, "message": "too much"}}
    assert len(manager.commands) == 1


@pytest.mark.parametrize(
    ("released", "then"),
    [
        ([answer(released=[77]), answer(error={"kind": "unknown", "message": "no pin"})], "was released on the others"),
        ([answer(error={"kind": "failed", "message": "broken"})] * 2, "the others keep pin 77, .* broken"),
    ],
    ids=["and is released", "and cannot be released"],
)
def test_a_pin_that_one_copy_refuses_is_pinned_on_none(released: list[dict[str, Any]], then: str) -> None:
    refusal = answer(error={"kind": "budget", "message": "too much"}, data_parallel_rank=3)
    manager = Manager(refusal, answer(pin={"id": 77}, data_parallel_rank=2), later=released)
    response = client(manager).post(pinning_client.PATH, json={"token_ids": [1]})
    assert response.status_code == 409
    error = response.json()["error"]
    assert error["kind"] == "budget"
    assert re.search(f"copy 3 of the model refused: too much; .*{then}", error["message"])
    assert manager.commands[1:] == [{"command": "release", "id": 77}]


@pytest.mark.parametrize("had", [0, 1])
def test_a_pin_that_a_copy_had_stays_where_another_refuses(had: int) -> None:
    """Also on the copy that refuses: memory may have shortened the pin there and ended it on the others."""
    had_before: list[dict[str, Any]] = [{"renewed": True} if copy == had else {} for copy in range(2)]
    refusal = answer(error={"kind": "budget", "message": "too much"}, data_parallel_rank=0, **had_before[0])
    renewal = answer(pin={"id": 77}, data_parallel_rank=1, **had_before[1])
    manager = Manager(refusal, renewal, answer(pin={"id": 77}, data_parallel_rank=2))
    response = client(manager).post(pinning_client.PATH, json={"token_ids": [1]})
    assert response.status_code == 409
    assert response.json()["error"]["message"] == (
        "copy 0 of the model refused: too much; the others keep pin 77, which was pinned before"
    )
    assert [command["command"] for command in manager.commands] == ["pin"]


def test_a_release_that_one_copy_refuses_says_so() -> None:
    """One copy may have shed a pin, or seen it expire, before the other."""
    manager = Manager(answer(released=[5]), answer(error={"kind": "unknown", "message": "there is no pin 5"}))
    response = client(manager).request("DELETE", pinning_client.PATH, json={"id": 5})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == (
        "copy 1 of the model refused: there is no pin 5; the others did as asked"
    )


def test_schedulers_that_do_not_know_the_command_are_named() -> None:
    response = client(Manager({})).get(pinning_client.PATH)
    assert response.status_code == 503
    assert "PREFIXPACK_PIN_BUDGET_PERCENT" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'{"text": "a", "token_ids": [1]}', b'{"id": "x"}', b'{"text": 3}', b'{"token_ids": 5}',
        b'{"token_ids": [true]}', b'{"text": "\\ud800"}',
        pytest.param(b'{"token_ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="nested too deep"),
    ],
)  # fmt: skip
def test_bad_bodies_reach_no_scheduler(body: bytes) -> None:
    manager = Manager(answer())
    response = client(manager).request("DELETE", pinning_client.PATH, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["kind"] == "invalid"
    assert manager.commands == []


def test_a_server_without_tokenizer_takes_only_tokens() -> None:
    manager = Manager(answer())
    manager.tokenizer = None
    assert "give token_ids" in client(manager).post(pinning_client.PATH, json={"text": "a"}).json()["error"]["message"]
    assert client(manager).post(pinning_client.PATH, json={"token_ids": [1]}).status_code == 200


@pytest.mark.parametrize("field", ["token_ids", "text"])
def test_prefixes_longer_than_any_pool_reach_no_scheduler(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning_client, "MAX_TOKENS", 4)
    manager = Manager(answer())
    prefix = {"token_ids": [1] * 5, "text": "abcde"}[field]
    response = client(manager).post(pinning_client.PATH, json={field: prefix})
    assert (response.status_code, manager.commands) == (400, [])
    assert "5 tokens: a prefix can have up to 4" in response.json()["error"]["message"]
