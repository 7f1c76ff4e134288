"""Counters and last packed batch of a running server, read from GET /server_info."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.explain.batch import InputError
from sgl_prefix_attn.explain.server import read_states
from tests.explain.conftest import Answers

Serve = Callable[..., str]
Info = dict[str, Any]
Capture = pytest.CaptureFixture[str]


def failure(url: str, api_key: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        read_states(url, api_key)
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
    assert batch is not None
    assert batch.seq_lens.tolist() == recorded["batch"]["seq_lens"]
    assert batch.paths[0][0][1] == 0


def test_the_state_of_the_previous_release_is_read_with_a_warning(
    serve: Serve, server_info: Info, caplog: pytest.LogCaptureFixture
) -> None:
    state = own_state(server_info)
    state["inner_backend"] = state.pop("stock_backend")
    url = serve({"/server_info": (200, server_info)})
    assert read_states(url)[0].stock_backend == state["inner_backend"]
    assert "'inner_backend' is deprecated" in caplog.text


def test_each_data_parallel_rank_has_a_state_before_its_first_packed_batch(serve: Serve, server_info: Info) -> None:
    server_info["internal_states"].append(copy.deepcopy(server_info["internal_states"][0]))
    own_state(server_info)["batch"] = None
    states = read_states(serve({"/get_server_info": (200, server_info)}))  # the path of older servers
    assert [state.described_batch("last") is None for state in states] == [True, False]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({}, "/get_server_info: HTTP 404 Not Found"),
        ({"/server_info": (503, b"busy")}, "/server_info: HTTP 503 Service Unavailable"),
        ({"/server_info": (200, b"<html>")}, "/server_info: the answer is not JSON: "),
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


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://"])
def test_unusable_address(url: str) -> None:
    with pytest.raises(InputError, match=f"server {url!r}: expected http://HOST:PORT"):
        read_states(url)


def explain(*arguments: str) -> int:
    return main(["explain", "--server", *arguments])


def test_explain_prints_counters_and_last_batch(serve: Serve, server_info: Info, capsys: Capture) -> None:
    url = serve({"/server_info": (200, server_info)})
    assert explain(url) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{url} rank 0 since its start\n  sglang ")
    assert f"last packed batch: {url} rank 0\n  batch " in text
    shape = own_state(server_info)["shape"]
    assert f"{shape['q_heads']}/{shape['kv_heads']} heads, head_dim {shape['head_dim']}" in text
    assert "Predicted attention time of a layer" in text
    assert explain(url, "--device", "h200", "--heads", "32/4") == 0
    text = capsys.readouterr().out
    assert "264 workers" in text
    assert "32/4 heads" in text


def test_explain_of_two_ranks(serve: Serve, server_info: Info, capsys: Capture, tmp_path: Path) -> None:
    idle = copy.deepcopy(server_info["internal_states"][0])
    idle["prefixpack"]["batch"] = None
    server_info["internal_states"].append(idle)
    url = serve({"/server_info": (200, server_info)})
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


def test_explain_draws_one_batch_only(serve: Serve, server_info: Info, capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    server_info["internal_states"] *= 2
    url = serve({"/server_info": (200, server_info)})
    assert explain(url, "--plot", str(tmp_path / "out.png")) == 2
    assert "--plot draws one batch and there are 2; choose one with --rank" in capsys.readouterr().err
    assert explain(url, "--rank", "1", "--plot", str(tmp_path / "out.png")) == 0
    assert (tmp_path / "out.png").exists()


def test_unusable_device(serve: Serve, server_info: Info, capsys: Capture) -> None:
    del own_state(server_info)["device"]["workers"]
    assert explain(serve({"/server_info": (200, server_info)})) == 2
    assert "the server's device: workers: " in capsys.readouterr().err
