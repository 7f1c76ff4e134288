"""Two servers compared by requests: pairs, orders, the verdict, and what is refused."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.abtest import servers
from sgl_prefix_attn.abtest.servers import BlockTimes, block_times, compare_servers, read_requests
from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.workload import Request
from tests.support.http_stub import answering

CHECK = servers.check_two_servers
URLS = ("http://a:1", "http://b:1")
REQUESTS = [Request(str(number), (1, 2, number), 8) for number in range(4 * 61)]


@pytest.fixture(autouse=True)
def two_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at URLS."""
    monkeypatch.setattr(servers, "check_two_servers", lambda *arguments: None)


@pytest.mark.parametrize(("b_over_a", "winner"), [(1.0, None), (1.05, "A"), (1 / 1.05, "B")])
def test_each_block_goes_to_both_in_a_drawn_order(b_over_a, winner, monkeypatch):
    sent: list[tuple[str, str]] = []
    rng = np.random.default_rng(1)

    def block_times(url: str, requests: Sequence[Request], api_key: str | None) -> BlockTimes:
        sent.append((url, requests[0].name))
        factor = (b_over_a if url == URLS[1] else 1.0) * rng.lognormal(0, 0.05)
        return BlockTimes(2.0 * factor, 10.0, 500.0 / factor, [[len(sent)]])

    monkeypatch.setattr(servers, "block_times", block_times)
    verdict = compare_servers(URLS, REQUESTS, 4, seed=3, effect=0.01, seconds=60)
    assert (verdict.comparison.winner, verdict.comparison.pairs, verdict.equal_tokens) == (winner, 60, 0.0)
    pairs = [sent[index : index + 2] for index in range(0, len(sent), 2)]
    assert [{url for url, _ in pair} for pair in pairs] == [set(URLS)] * 61
    assert all(one[1] == other[1] for one, other in pairs)
    assert [URLS.index(pair[0][0]) for pair in pairs[1:]] == verdict.orders
    assert 15 < sum(verdict.orders) < 45
    assert ("No difference seen" if winner is None else f"{winner} is faster") in verdict.lines()[3]


def test_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "block_times", lambda *arguments: BlockTimes(0.0, 1.0, 1.0, [[1]]))
    verdict = compare_servers(URLS, REQUESTS, 4, seed=3, effect=0.01, seconds=-1.0)
    assert (verdict.comparison.pairs, verdict.comparison.pairs_needed) == (0, None)
    assert "At least 8 pairs are needed" in verdict.lines()[3]
    assert not any("equal tokens" in line for line in verdict.lines())


def test_a_late_failure_keeps_the_blocks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def block_times(url: str, requests: Sequence[Request], api_key: str | None) -> BlockTimes:
        sent.append(url)
        if len(sent) > good:
            raise ValueError(f"{url}: 4 requests got no token for 600 s")
        return BlockTimes(2.0, 1.0, 1.0, [[1]])

    monkeypatch.setattr(servers, "block_times", block_times)
    good = 21  # a pair for warm-up, nine that count, and half of one
    verdict = compare_servers(URLS, REQUESTS, 4, seed=3, effect=0.01, seconds=60)
    assert (verdict.comparison.pairs, len(verdict.tpot_ms), len(verdict.orders)) == (9, 9, 9)
    text = f"Block 10 of 60 failed and does not count: {sent[-1]}: 4 requests got no token for 600 s"
    assert verdict.lines()[-1] == verdict.as_json()["ended"] == text
    sent.clear()
    good = 3
    with pytest.raises(ValueError, match="got no token for 600 s"):
        compare_servers(URLS, REQUESTS, 4, seed=3, effect=0.01, seconds=60)


@pytest.mark.parametrize("finished", [5, 2, 1])
def test_ctrl_c_keeps_the_blocks_before_it(finished, tmp_path, monkeypatch, capsys):
    """finished: sendings before Ctrl-C, two of them for warm-up."""
    sent: list[str] = []

    def block_times(url: str, requests: Sequence[Request], api_key: str | None) -> BlockTimes:
        if len(sent) == finished:
            signal.raise_signal(signal.SIGINT)
        sent.append(url)
        return BlockTimes(2.0, 1.0, 1.0, [[1]])

    monkeypatch.setattr(servers, "block_times", block_times)
    path = tmp_path / "requests.jsonl"
    path.write_text(8 * '{"input_ids": [5, 6], "max_new_tokens": 4}\n')
    words = ["abtest", "servers", *URLS, "--requests", str(path), "--block", "2", "--out", str(tmp_path / "ab.json")]
    status = main(words)
    out = capsys.readouterr().out
    if finished < 4:  # no block counts
        assert (status, out, (tmp_path / "ab.json").exists()) == (130, "", False)
        return
    assert status == 0
    assert "The test was stopped early, by Ctrl-C: 1 of 3 blocks count." in out
    verdict = json.loads((tmp_path / "ab.json").read_text())["verdict"]
    assert (verdict["tpot_ms"], len(verdict["orders"])) == ([[2.0, 2.0]], 1)


def event(tokens: list[int], finish: str | None = None, cached: int = 0) -> str:
    meta = {"id": "x", "finish_reason": finish and {"type": finish}, "cached_tokens": cached}
    return "data: " + json.dumps({"output_ids": tokens, "meta_info": meta})


@pytest.fixture
def server_of() -> Iterator[Callable[..., str]]:
    """Starts a server that answers every request with these events, after a call of `first`."""
    with ExitStack() as stack:

        def start(events: list[str], first: Callable[[], object] = object, key: str = "") -> str:
            def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
                if key and request.headers["Authorization"] != f"Bearer {key}":
                    return 401, b""
                first()
                return 200, "\n\n".join([*events, "data: [DONE]", ""]).encode()

            return stack.enter_context(answering(answer))

        yield start


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event([7, 8, 9], "stop")], r"request a: 3 tokens at its end \(stop\), 3 were asked for"),
        ([event([7]), event([7, 8], "abort")], r"request a: 2 tokens at its end \(abort\), 3 were asked for"),
        ([event([7]), event([8]), event([9], "length")], r"request a: 1 tokens at its end \(length\), 3 were asked"),
        ([event([7]), "data: {oops"], "request a: unknown event {oops: JSONDecodeError"),
        (['data: {"text": "x"}'], "request a: unknown event .*: KeyError\\('meta_info'\\)"),
        (["data: 3"], "request a: unknown event 3: TypeError"),
        (['data: {"error": "too long"}'], "request a: too long"),
    ],
)
def test_answers_that_cannot_be_compared_are_errors(events, message, server_of):
    url = server_of(events)
    with pytest.raises(ValueError, match=f"^{url}: {message}"):
        block_times(url, [Request("a", (1, 2), 3)])


def test_ctrl_c_leaves_a_block_that_runs_and_logs_nothing(server_of: Callable[..., str], caplog: Any) -> None:
    left = threading.Event()

    def stop() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        left.wait(60)

    url = server_of([], stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            block_times(url, [Request("a", (1, 2), 3)])
    finally:
        left.set()
    gc.collect()
    assert caplog.text == ""


def test_answers_of_the_requested_length_count(server_of: Callable[..., str]) -> None:
    times = block_times(server_of([event([7]), event([7, 8, 9], "length")]), [Request("a", (1, 2), 3)])
    assert times.tokens == [[7, 8, 9]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected a JSON object with input_ids and max_new_tokens"),
        ("[]", "line 2: expected a JSON object"),
        ('{"max_new_tokens": 3}', "line 2: expected a JSON object with input_ids and max_new_tokens: KeyError"),
        ('{"input_ids": "text", "max_new_tokens": 3}', "line 2: input_ids: expected a list of token ids"),
        ('{"input_ids": [1, true], "max_new_tokens": 3}', "line 2: input_ids: expected a list of token ids"),
        ('{"input_ids": [1], "max_new_tokens": 1}', "line 2: expected max_new_tokens from 2 and n from 1 on"),
        ('{"input_ids": [1], "max_new_tokens": 3, "n": 0}', "line 2: expected max_new_tokens from 2 and n from 1 on"),
    ],
)
def test_unusable_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 6], "max_new_tokens": 4, "n": 2}) + "\n" + line + "\n\n")
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        read_requests(path)


NEW, KNOWN = ([event([7, 8], "length", cached)] for cached in (0, 200))


@pytest.mark.parametrize(
    ("events", "message"),
    [((NEW, NEW), None), ((KNOWN, KNOWN), None), ((KNOWN, NEW), None), ((NEW, KNOWN), "lead to one server")],
)
def test_a_prompt_that_the_first_address_got_is_not_known_at_the_second(events, message, server_of):
    urls = tuple(server_of(one) for one in events)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        CHECK(urls, REQUESTS, None)


def test_names_of_this_machine_are_one_server(server_of: Callable[..., str]) -> None:
    url = server_of(NEW)
    with pytest.raises(ValueError, match="lead to one server"):
        CHECK((url, url.replace("127.0.0.1", "localhost")), REQUESTS, None)
    CHECK((url, f"{url}/behind/a/proxy"), REQUESTS, None)


def test_the_key_is_an_option_or_a_variable(server_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(servers, "check_two_servers", CHECK)
    urls = [server_of([event([7, 8, 9, 10], "length")], key="sesame") for _ in range(2)]
    path = tmp_path / "requests.jsonl"
    path.write_text(8 * '{"input_ids": [5, 6], "max_new_tokens": 4}\n')
    words = ["abtest", "servers", *urls, "--requests", str(path), "--block", "2"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(words) == 2
    assert "status 401" in (err := capsys.readouterr().err)
    assert "; give --api-key" in err
    assert main([*words, "--api-key", "sesame"]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert main(words) == 0


def test_a_server_without_tokens_stands_still(server_of: Callable[..., str]) -> None:
    url = server_of([], lambda: time.sleep(2))
    with pytest.raises(TimeoutError):
        replay(url, [Request("a", (1, 2), 3)], stall_seconds=0.5)
    slow = server_of([event([7]), event([7, 8, 9], "length")], lambda: time.sleep(1))
    late = [Request(str(n), (1, 2), 3, arrival_seconds=n) for n in range(3)]
    assert len(replay(slow, late, stall_seconds=2.5)) == 3  # which takes three seconds
