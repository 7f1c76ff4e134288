"""The HTTP endpoint without a server behind them: what is sent to the schedulers, and how answers come back."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient  # noqa: E402
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from sgl_prefix_attn.sglang_plugin.compat import http_routes  # noqa: E402
from sgl_prefix_attn.sglang_plugin.pinning import client as pinning_client  # noqa: E402
from sgl_prefix_attn.sglang_plugin.pinning import commands  # noqa: E402
from tests.support.schedulers import TokenizerManager  # noqa: E402

ADAPTER = LoRARef(lora_id="0c1d", lora_name="ours", lora_path="/adapters/ours")


class Manager(TokenizerManager):
    """Gives these answers to the first command, then `later`; keeps the commands."""

    def __init__(self, *answers: dict[str, Any], later: list[dict[str, Any]] | None = None) -> None:
        super().__init__(self._answer)
        self.first, self.later = list(answers), later
        self.commands: list[dict[str, Any]] = []
        self.tokenizer: Any = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
        self.context_len = 100
        self.model_config = SimpleNamespace(vocab_size=1000)
        self.lora_ref_cache = dict.fromkeys(["ours", "evicted"])
        self.lora_registry = LoRARegistry([ADAPTER])

    def _answer(self, request: Any) -> list[dict[str, Any]]:
        command = commands.decode(request.rid)
        fields = {name: value for name, value in command.model_dump().items() if value not in (None, "")}
        self.commands.append({"command": type(command).__name__.removesuffix("Command"), **fields})
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
    assert manager.commands == [{"command": "Pin", "token_ids": [97, 98], "ttl_steps": 5}]


def test_brackets_and_quotes_in_a_text_are_text() -> None:
    manager = Manager(answer())
    text = '[{"a": "\\"}]' * 7 + "\\"
    assert client(manager).post(pinning_client.PATH, json={"text": text}).status_code == 200
    assert manager.commands[0]["token_ids"] == list(map(ord, text))


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
    assert manager.commands[1:] == [{"command": "ReleaseOne", "id": 77}]


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
    assert [command["command"] for command in manager.commands] == ["Pin"]


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


LONG = "k" * 257
NESTED = "the body is nested: a JSON object with at most one list is accepted"
SAY = "say which prefix: either text or token_ids"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body has to be a JSON object: "),
        (b"{", "the body has to be a JSON object: "),
        (b"\xff", "the body has to be a JSON object: "),
        (b"[]", "the body has to be a JSON object: it is of type list"),
        (b'"text"', "the body has to be a JSON object: it is of type str"),
        (b'{"text": "a", "label": "text", "text" : "b"}', "the body has a key twice: 'text'"),
        (b'{"text": "a", "te\\u0078t": "b"}', "the body has a key twice: "),
        (b'{"token_ids": [NaN]}', "the body has to be a JSON object: "),
        (b'{"text": "\\ud800"}', "the body has to be a JSON object: "),
        (b"{}", SAY),
        (b'{"text": "a", "token_ids": [1]}', SAY),
        (b'{"id": "x"}', "id: Input should be a valid integer"),
        (b'{"id": 9007199254740992}', "id: Input should be less than 9007199254740992"),
        (b'{"id": 1, "text": "a"}', "unknown key: 'text'; accepted: id"),
        (b'{"command": "list", "text": "a"}', "unknown key: 'command'; accepted: token_ids, text, extra_key, "),
        (b'{"text": 3}', "text: Input should be a valid string"),
        (b'{"text": ""}', "text: String should have at least 1 character"),
        (b'{"text": []}', "text: Input should be a valid string"),
        (b'{"text": {"a": []}}', NESTED),
        (b'{"token_ids": [[], []]}', NESTED),
        (b'{"text": "\\\\\\"[[[[", "a": [[]]}', NESTED),
        (b'{"token_ids": 5}', "token_ids: Input should be a valid list"),
        (b'{"token_ids": []}', "token_ids: List should have at least 1 item"),
        (b'{"token_ids": [true]}', "token_ids.0: Input should be a valid integer"),
        (b'{"token_ids": [1, -1, -1]}', "token_ids.1: Input should be greater than or equal to 0"),
        (b'{"token_ids": [1.5]}', "token_ids.0: Input should be a valid integer"),
        (b'{"token_ids": [' + b"9" * 99 + b"]}", "token_ids.0: Input should be a valid integer"),
        (b'{"token_ids": [999, 1000]}', "token_ids: 1000 is no token of this model: they are 0 to 999"),
        ('{"text": "\u0431"}'.encode(), "token_ids: 1073 is no token of this model: they are 0 to 999"),
        ({"token_ids": [1] * 101}, "token_ids has 101 tokens: a prefix of this server can have up to 100"),
        ({"text": "a" * 101}, "token_ids has 101 tokens: a prefix of this server can have up to 100"),
        ({"text": "a" * 801}, "text has 801 characters: at most 800 are accepted"),
        ({"text": "a", "extra_key": LONG}, "extra_key: String should have at most 256 characters"),
        ({"text": "a", "cache_salt": "\u00e9" * 129}, "cache_salt: it can have up to 256 bytes"),
        ({"text": "a", "lora_path": LONG}, "lora_path: String should have at most 256 characters"),
        ({"text": "a", "lora_path": "nope"}, "lora_path: no LoRA adapter 'nope' is loaded"),
        ({"text": "a", "lora_path": "evicted"}, "lora_path: no LoRA adapter 'evicted' is loaded"),
        ({"text": "a", "extra_key": "ours"}, "extra_key 'ours' is the name of a LoRA adapter: give it as lora_path"),
        ({str(key): 0 for key in range(32)}, "unknown key: '0', '1', '2', '3', '4', 27 more; accepted: "),
        ({str(key): 0 for key in range(33)}, "the body has too many keys and strings: at most 32 are accepted"),
        ({LONG: 0}, f"unknown key: '{LONG[:40]}'; accepted: "),
        pytest.param(b'{"token_ids": ' + b"[" * 8000 + b"]" * 8000 + b"}", NESTED, id="nested too deep"),
        pytest.param(b'{"token_ids": ' + b"[" * 900 + b"]" * 900 + b"}", NESTED, id="nested"),
    ],
)  # fmt: skip
def test_bad_bodies_reach_no_scheduler(body: bytes | dict[str, Any], message: str) -> None:
    manager = Manager(answer())
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client(manager).request("DELETE", pinning_client.PATH, content=content)
    error = response.json()["error"]
    assert (response.status_code, error["kind"], manager.commands) == (400, "invalid", [])
    assert message in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("fields", [{"label": "l" * 201}, {"ttl_steps": 0}, {"ttl_steps": 1 << 31}, {"uses": 1}])
def test_bad_fields_of_a_pin_are_named(fields: dict[str, Any]) -> None:
    manager = Manager(answer())
    response = client(manager).post(pinning_client.PATH, json={"token_ids": [1], **fields})
    assert (response.status_code, manager.commands) == (400, [])
    assert next(iter(fields)) in response.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_query_is_not_ignored(method: str) -> None:
    server = client(Manager(answer()))
    response = server.request(method, pinning_client.PATH, params={"id": 5})
    assert (response.status_code, response.json()["error"]["message"]) == (
        400,
        "unknown parameter: 'id'; accepted: none",
    )
    assert server.request(method, pinning_client.PATH, params={"a": "a" * 600}).status_code == 414


@pytest.mark.parametrize("announced", [True, False], ids=["with its length", "in chunks"])
def test_a_large_body_is_refused_before_it_is_read(announced: bool) -> None:
    """The limit follows the context length: 16 bytes a token, and 16 KiB."""
    manager, most = Manager(answer()), 16 * 100 + (16 << 10)
    server = client(manager)
    body = b" " * (most + 1)
    content = body if announced else iter([body[:100], body[100:]])
    response = server.post(pinning_client.PATH, content=content)
    message = f"the body is too large: at most {most} bytes are accepted"
    assert (response.status_code, response.json()["error"]["message"]) == (413, message)
    padded = b'{"token_ids": [1]}'.ljust(most)
    assert server.post(pinning_client.PATH, content=padded).status_code == 200


def test_a_body_stops_being_read_at_the_limit() -> None:
    received = []

    async def receive() -> dict[str, Any]:
        received.append(1)
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    request = fastapi.Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(http_routes.RequestError) as raised:
        asyncio.run(http_routes.Bodies().read(request, 1000, dict))
    assert (raised.value.status, len(received)) == (413, 11)


def test_a_slow_body_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_routes, "MOST_READ_SECONDS", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    request = fastapi.Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(http_routes.RequestError, match=r"the body took more than 0\.01 s") as raised:
        asyncio.run(http_routes.Bodies().read(request, 1000, dict))
    assert raised.value.status == 408


def test_a_body_of_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()
    monkeypatch.setattr(manager, "context_len", 10_000)
    for body in (b'{"token_ids": [' + b"1," * 25_000 + b"1]}", b'{"x": [' + b"null," * 25_000 + b"1]}"):
        response = client(manager).post(pinning_client.PATH, content=body)
        assert (response.status_code, "too many values" in response.text) == (400, True)
    assert manager.commands == []


def test_a_body_does_not_wait_for_ever_behind_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_routes, "MOST_READ_SECONDS", 0.2)

    async def run() -> None:
        bodies = http_routes.Bodies()
        for _ in range(http_routes.MOST_BODIES):
            await bodies._turns.acquire()
        with pytest.raises(http_routes.RequestError, match="too many bodies are being read") as refused:
            await bodies.read(None, 10, lambda fields: fields)
        assert refused.value.status == 503

    asyncio.run(run())


def test_texts_are_encoded_outside_of_the_event_loop() -> None:
    manager, threads = Manager(answer()), []

    def encode(text: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return [1]

    manager.tokenizer.encode = encode
    assert client(manager).post(pinning_client.PATH, json={"text": "a"}).status_code == 200
    assert threads[0].startswith("prefixpack-bodies")


@pytest.mark.parametrize(("extra_key", "sent"), [(None, "0c1d"), ("mine", "mine0c1d")])
def test_a_lora_adapter_becomes_the_extra_key_of_its_requests(extra_key: str | None, sent: str) -> None:
    manager = Manager(answer())
    body = {"token_ids": [1], "lora_path": "ours", "extra_key": extra_key}
    assert client(manager).post(pinning_client.PATH, json=body).status_code == 200
    assert manager.commands == [{"command": "Pin", "token_ids": [1], "extra_key": sent}]
    request = Req("r", "", array("q", [1]), SamplingParams(), extra_key=extra_key, lora_id=ADAPTER.lora_id)
    assert request.extra_key == sent


def test_python_callers_meet_the_same_checks() -> None:
    manager = Manager(answer(pins=[]))
    loop = asyncio.new_event_loop()
    pins = pinning_client.EnginePins(SimpleNamespace(tokenizer_manager=manager, loop=loop))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"token_ids": range(1 << 60)}, "a prefix of this server can have up to 100"),
        ({"token_ids": [1000]}, "1000 is no token of this model"),
        ({"text": "a" * 1601}, "text has 1601 characters"),
        ({"text": "\ud800"}, "text: Input should be a valid string"),
        ({"text": "a", "extra_key": "ours"}, "give it as lora_path"),
        ({}, SAY),
    ]
    for fields, message in bad:
        for call in (pins.pin, pins.release):
            with pytest.raises(ValueError, match=message):
                call(**fields)
    assert manager.commands == []
    pins.pin(range(3), lora_path="ours")
    pins.release(7)
    pins.pins()
    loop.close()
    assert manager.commands == [
        {"command": "Pin", "token_ids": [0, 1, 2], "extra_key": "0c1d"},
        {"command": "ReleaseOne", "id": 7},
        {"command": "List"},
    ]


def test_a_server_without_tokenizer_takes_only_tokens() -> None:
    manager = Manager(answer())
    manager.tokenizer = None
    assert "give token_ids" in client(manager).post(pinning_client.PATH, json={"text": "a"}).json()["error"]["message"]
    assert client(manager).post(pinning_client.PATH, json={"token_ids": [1]}).status_code == 200
