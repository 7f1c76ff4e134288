"""Counters and last packed batch of a running server, read from GET /server_info."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.explain.batch import InputError
from sgl_prefix_attn.explain.server import read_states
from tests.explain.conftest import Answers
from tests.support.pages import documented

Serve = Callable[..., str]
Info = dict[str, Any]
Capture = pytest.CaptureFixture[str]


def failure(url: str) -> str:
    with pytest.raises(InputError) as caught:
        read_states(url)
    assert str(caught.value).startswith(url)
    return str(caught.value).removeprefix(url)


def own_state(server_info: Info) -> Info:
    return server_info["internal_states"][0]["prefixpack"]


def test_recorded_answer(serve: Serve, server_info: Info) -> None:
    (state,) = read_states(serve({"/server_info": (200, server_info)}) + "/")
    recorded = own_state(server_info)
    assert state.sglang == server_info["version"]
    assert state.counters.model_dump() == recorded["counters"]
    batch = state.described_batch("last")
    assert batch.seq_lens.tolist() == recorded["batch"]["seq_lens"]
    assert batch.paths[0][0][1] == 0


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({}, "/get_server_info: HTTP 404 Not Found"),
        ({"/server_info": (503, b"busy")}, "/server_info: HTTP 503 Service Unavailable"),
        ({"/server_info": (200, b"<html>")}, "/server_info: the answer is not JSON: "),
        ({"/server_info": (200, b"[" * 100_000)}, "/server_info: the answer is not JSON: "),
        ({"/server_info": (200, [1])}, ": the answer is not a JSON object; is this an SGLang server?"),
        ({"/server_info": (200, {})}, ": the answer has no internal_states; is this an SGLang server?"),
        (
            {"/server_info": (200, {"internal_states": [{}], "version": "0.5.20", "attention_backend": "fa3"})},
            ": SGLang 0.5.20 with attention backend fa3 reports no prefixpack state; "
            "start it with --attention-backend prefixpack",
        ),
    ],
)
def test_answer_of_another_server(serve: Serve, answers: Answers, expected: str) -> None:
    assert failure(serve(answers)).startswith(expected)


def test_state_of_another_version_or_with_a_key_missing(serve: Serve, server_info: Info) -> None:
    state = own_state(server_info)
    url = serve({"/server_info": (200, server_info)})
    del state["counters"]["plans_made"]
    assert failure(url) == ": prefixpack state: counters.plans_made: Field required"
    state["version"] = 2
    assert failure(url) == ": prefixpack state of version 2; this program reads version 1"


def test_nobody_answers() -> None:
    assert failure("http://127.0.0.1:9").startswith("/server_info: no answer: ")


def test_an_api_key_is_sent(serve: Serve, server_info: Info) -> None:
    url = serve({"/server_info": (200, server_info)}, api_key="secret")
    assert failure(url).startswith("/server_info: HTTP 401")
    assert len(read_states(url, "secret")) == 1


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://"])
def test_unusable_address(url: str) -> None:
    with pytest.raises(InputError, match=f"server {url!r}: expected http://HOST:PORT"):
        read_states(url)


def explain(*arguments: str) -> int:
    return main(["explain", "--server", *arguments])


def test_explain_prints_counters_and_last_batch(serve: Serve, server_info: Info, capsys: Capture) -> None:
    url = serve({"/server_info": (200, server_info)})
    assert main(documented("python -m sgl_prefix_attn explain --server URL", {"URL": url}).split()[3:]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{url} rank 0 since its start\n  sglang ")
    assert f"last packed batch: {url} rank 0\n  batch " in text
    shape = own_state(server_info)["shape"]
    assert f"{shape['q_heads']}/{shape['kv_heads']} heads, head_dim {shape['head_dim']}" in text
    assert "Route: none, the server does not name its kernels\n" in text
    assert explain(url, "--device", "h200", "--heads", "32/4") == 0
    text = capsys.readouterr().out
    assert "264 workers" in text
    assert "32/4 heads" in text


RULE = "sharing saves much"
ROUTE = {
    "setting": "auto", "policy": "rule", "rule": RULE, "live": None, "graph_sizes": [],
    "kernels": {"gpu": "NVIDIA H200", "capability": "9.0", "packed": "native", "stock": "flashinfer"},
    "last": {"route": "packed", "saved_mib": 31.5, "kv_mib": 40.25, "requests": 64},
}  # fmt: skip


@pytest.fixture
def h200_info(server_info: Info) -> Info:
    """The recorded answer as of a server on an H200."""
    shape, device = ModelShape(32, 8, 128), DeviceModel.gpu(132, group=4)
    state = {"route": copy.deepcopy(ROUTE), "shape": asdict(shape), "device": asdict(device)}
    own_state(server_info).update(state | {"stock_backend": "flashinfer"})
    return server_info


def test_the_servers_rule_and_its_last_decision_are_told(serve: Serve, h200_info: Info, capsys: Capture) -> None:
    url = serve({"/server_info": (200, h200_info)})
    assert explain(url) == 0
    text = capsys.readouterr().out
    assert re.search(rf"\n  rule +packed if {RULE}\n", text)
    assert re.search(r"\n  last decision +packed, 64 requests, sharing saves 31.5 of 40.2 MiB of KV a layer\n", text)
    own_state(h200_info)["route"]["last"] = {"route": "stock", "packed_us": 3.0}  # of an older server
    assert explain(serve({"/server_info": (200, h200_info)})) == 0
    assert re.search(r"\n  last decision +stock, 0 requests", capsys.readouterr().out)


def test_the_route_is_over_the_servers_stock_backend(serve: Serve, h200_info: Info, capsys: Capture) -> None:
    url = serve({"/server_info": (200, h200_info)})

    def told(*options: str) -> str:
        assert explain(url, "--json", *options) == 0
        return json.loads(capsys.readouterr().out)["ranks"][0]["last_packed_batch"]["route"]["stock"]

    assert told() == told("--device", "h200") == told("--heads", "32/4") == "flashinfer"
    assert told("--stock", "fa3") == "fa3"
    del own_state(h200_info)["route"]["kernels"]["packed"]
    assert explain(serve({"/server_info": (200, h200_info)})) == 2
    assert "the server's route.kernels: packed: " in capsys.readouterr().err


def test_explain_of_two_ranks(serve: Serve, server_info: Info, capsys: Capture) -> None:
    idle = copy.deepcopy(server_info["internal_states"][0])
    idle["prefixpack"]["batch"] = None
    server_info["internal_states"].append(idle)
    url = serve({"/get_server_info": (200, server_info)})  # the path of older servers
    assert explain(url, "--json", "--rank", "1") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (rank["rank"], rank["last_packed_batch"]) == (1, None)
    assert explain(url, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["ranks"]
    assert first["last_packed_batch"]["kv_tokens"]["packed"] > 0
    assert second["counters"] == idle["prefixpack"]["counters"]
    assert explain(url) == 0
    assert "no batch ran packed yet" in capsys.readouterr().out
    assert explain(url, "--rank", "2") == 2
    assert f"--rank 2: {url} reports ranks 0 to 1" in capsys.readouterr().err


def test_unusable_device(serve: Serve, server_info: Info, capsys: Capture) -> None:
    del own_state(server_info)["device"]["workers"]
    assert explain(serve({"/server_info": (200, server_info)})) == 2
    assert "the server's device: workers: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (
            {"steps_packed": {"decode": 1506}, "fallbacks": {"compute_bound": 461}},
            "461 steps beside 1,510 decode steps",
        ),
        ({"steps_packed": {"decode": 1506}, "fallbacks": {"compute_bound": 151}}, None),
        ({"steps_packed": {"decode": 200, "extend": 30, "mixed": 9}, "fallbacks": {}}, "39 steps beside 204 decode"),
        ({"steps_packed": {}, "fallbacks": {"compute_bound": 9}, "routed_steps": {}}, None),
    ],
)
def test_options_for_refills_are_named_where_prefill_steps_are_many(serve, server_info, capsys, changes, shown):
    own_state(server_info)["counters"].update({"routed_steps": {"packed": 1506, "stock": 4}, **changes})
    assert main(["explain", "--server", serve({"/server_info": (200, server_info)})]) == 0
    out = capsys.readouterr().out
    assert ("--min-free-slots-delay" in out) == (shown is not None)
    assert shown is None or shown in out
