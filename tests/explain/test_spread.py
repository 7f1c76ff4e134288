"""`explain --server A --server B`: sharing lost because requests with equal prefixes run on different engines."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.explain import server
from sgl_prefix_attn.explain.spread import RunningPrompts, spread
from tests.support.pages import documented

BLOCK = 4
PROMPTS = "/prefixpack/prompts"


def running(*prompts: str, **fields: Any) -> dict[str, Any]:
    """What an engine tells about prompts; each letter is a token, and a hash is the text that it stands for."""
    hashes = [
        "".join(f"{prompt[:end]:.>16}" for end in range(BLOCK, min(len(prompt), 16) + 1, BLOCK)) for prompt in prompts
    ]
    return {"block": BLOCK, "key": "one", "pending": 0, "prompts": hashes, **fields}


def engines(*contents: tuple[str, ...]) -> dict[str, RunningPrompts]:
    return {str(i): RunningPrompts.model_validate(running(*prompts)) for i, prompts in enumerate(contents)}


def test_samples_of_one_prompt_on_two_engines() -> None:
    found = spread(engines(("systemAB", "systemAB", "systemCD"), ("systemAB", "other")))
    # Two blocks of four: "syst", "emAB" or "emCD"; "othe", and "r", which fills none.
    assert (found.per_request, found.kept, found.together) == (8 * 4 + 4, 4 + 4 + 4 + 8 + 4, 4 + 4 + 4 + 4)
    assert (found.groups, found.split) == (1, 1)
    assert found.lost == pytest.approx(8 / 20)


def test_groups_that_stay_together_lose_nothing() -> None:
    found = spread(engines(("aaaaaaaa",) * 4, ("bbbbbbbb",) * 4))
    assert (found.lost, found.groups, found.split) == (0.0, 2, 0)


@given(st.lists(st.lists(st.text("ab", max_size=10), max_size=5).map(tuple), min_size=1, max_size=4))
def test_bounds_of_any_spread(contents: list[tuple[str, ...]]) -> None:
    found = spread(engines(*contents))
    assert found.together <= found.kept <= found.per_request
    assert 0 <= found.lost <= 1
    assert spread(engines(tuple(prompt for prompts in contents for prompt in prompts))).together == found.together


def told(*prompts: str, **fields: Any) -> dict[str, tuple[int, Any]]:
    return {PROMPTS: (200, {"copies": [running(*prompts, **fields)]})}


def test_the_command(serve, capsys):
    urls = [serve(told(*prompts), api_key="ADMIN") for prompts in (("promptAB", "promptAB"), ("promptAB",))]
    hosts = ("http://host-a:30000", "http://host-b:30000")
    line = documented("python -m sgl_prefix_attn explain --server http://host-a", dict(zip(hosts, urls, strict=True)))
    assert main(shlex.split(line)[3:]) == 0
    text = capsys.readouterr().out
    assert "3 running requests on 2 engines" in text
    assert "prompts of several requests: 1, of which 1 run on more than one engine" in text
    assert "50% of the possible saving is lost to the spread" in text
    both = {"--server A": f"--server {urls[0]}", "--server B": f"--server {urls[1]} --api-key ADMIN"}
    assert main(shlex.split(documented("python -m sgl_prefix_attn explain --server A", both, "--json"))[3:]) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == 0.5


def test_servers_that_do_not_tell_or_are_idle_and_options_of_one_server(serve, capsys):
    old, idle = serve({}), serve(told())
    assert main(["explain", "--server", idle, "--server", old]) == 2
    error = capsys.readouterr().err
    assert f"{old}{PROMPTS}: HTTP 404" in error
    assert "needs the setting fingerprint_key and a server with --admin-api-key" in error
    keyed = serve(told(), api_key="ADMIN")
    assert main(["explain", "--server", idle, "--server", keyed, "--api-key", "ORDINARY"]) == 2
    assert f"{keyed}{PROMPTS}: HTTP 401" in capsys.readouterr().err
    assert main(["explain", "--server", idle, "--server", idle, "--rank", "0"]) == 2
    assert "--rank works with one --server" in capsys.readouterr().err
    assert main(["explain", "--server", idle, "--server", serve(told())]) == 0
    assert "no request runs on any of the engines" in capsys.readouterr().out
    assert main(["explain", "--server", idle, "--server", serve({PROMPTS: (200, {"copies": [{}]})})]) == 2
    assert "the answer has no prompts" in capsys.readouterr().err


def test_a_server_is_asked_until_all_prompts_are_hashed(monkeypatch):
    answers = [running("prom", pending=1), running("promptAB")]
    monkeypatch.setattr(server, "_get_json", lambda url, key: {"copies": [answers.pop(0)]})
    assert server.read_prompts("http://host")[0].prompts == running("promptAB")["prompts"]
    assert answers == []


def test_a_server_that_is_given_twice_counts_once(serve, capsys):
    url = serve(told("promptAB"))
    assert main(["explain", "--server", url, "--server", f"{url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"] == {url: 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": 256}, "the servers hash blocks of different sizes"),
        ({"key": "another"}, "the servers have different settings fingerprint_key"),
    ],
)
def test_what_cannot_be_compared_is_not(fields, message, serve, capsys):
    urls = [serve(told("promptAB")), serve(told("promptAB", **fields))]
    assert main(["explain", "--server", urls[0], "--server", urls[1]]) == 2
    assert f"explain: prompts cannot be compared, as {message}" in capsys.readouterr().err
