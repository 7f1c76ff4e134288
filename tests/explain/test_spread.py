"""`explain --server A --server B`: sharing lost because requests with equal prefixes run on different engines."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.explain.spread import RunningPrompts, spread
from tests.support.pages import documented

BLOCK = 4


def running(*prompts: str) -> dict[str, Any]:
    """What an engine tells about prompts; each letter is a token, and a hash is the text that it stands for."""
    return {
        "block": BLOCK,
        "prompts": [
            {"tokens": len(prompt), "hashes": [prompt[: end + BLOCK] for end in range(0, len(prompt), BLOCK)]}
            for prompt in prompts
        ],
    }


def engines(*contents: tuple[str, ...]) -> dict[str, RunningPrompts]:
    return {str(i): RunningPrompts.model_validate(running(*prompts)) for i, prompts in enumerate(contents)}


def test_samples_of_one_prompt_on_two_engines() -> None:
    found = spread(engines(("systemAB", "systemAB", "systemCD"), ("systemAB", "other")))
    # Two blocks of four: "syst", "emAB" or "emCD"; "othe", "r".
    assert (found.per_request, found.kept, found.together) == (8 * 4 + 5, 4 + 4 + 4 + 8 + 5, 4 + 4 + 4 + 5)
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


def told(server_info: dict[str, Any], *prompts: str) -> dict[str, Any]:
    info = copy.deepcopy(server_info)
    info["internal_states"][0]["prefixpack"]["running"] = running(*prompts)
    return info


def test_the_command(serve, server_info, capsys):
    urls = [
        serve({"/server_info": (200, told(server_info, *prompts))})
        for prompts in (("promptAB", "promptAB"), ("promptAB",))
    ]
    hosts = ("http://host-a:30000", "http://host-b:30000")
    line = documented("python -m sgl_prefix_attn explain --server http://host-a", dict(zip(hosts, urls, strict=True)))
    assert main(shlex.split(line)[3:]) == 0
    text = capsys.readouterr().out
    assert "3 running requests on 2 engines" in text
    assert "prompts of several requests: 1, of which 1 run on more than one engine" in text
    assert "50% of the possible saving is lost to the spread" in text
    both = {"--server A": f"--server {urls[0]}", "--server B": f"--server {urls[1]}"}
    assert main(shlex.split(documented("python -m sgl_prefix_attn explain --server A", both, "--json"))[3:]) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == 0.5


def test_servers_that_do_not_tell_or_are_idle_and_options_of_one_server(serve, server_info, capsys):
    old, idle = serve({"/server_info": (200, server_info)}), serve({"/server_info": (200, told(server_info))})
    assert main(["explain", "--server", idle, "--server", old]) == 2
    assert f"{old}: its version of sgl-prefix-attn does not tell the prompts" in capsys.readouterr().err
    assert main(["explain", "--server", idle, "--server", idle, "--rank", "0"]) == 2
    assert "--rank works with one --server" in capsys.readouterr().err
    other = serve({"/server_info": (200, told(server_info))})
    assert main(["explain", "--server", idle, "--server", other]) == 0
    assert "no request runs on any of the engines" in capsys.readouterr().out


def test_a_server_that_is_given_twice_counts_once(serve, server_info, capsys):
    url = serve({"/server_info": (200, told(server_info, "promptAB"))})
    assert main(["explain", "--server", url, "--server", f"{url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"] == {url: 1}


def test_blocks_of_different_sizes_are_not_compared(serve, server_info, capsys):
    other = told(server_info, "promptAB")
    other["internal_states"][0]["prefixpack"]["running"]["block"] = 256
    urls = [serve({"/server_info": (200, info)}) for info in (told(server_info, "promptAB"), other)]
    assert main(["explain", "--server", urls[0], "--server", urls[1]]) == 2
    message = "prompts cannot be compared, as the servers hash blocks of different sizes"
    assert f"explain: {message} ({urls[0]}: {BLOCK}, {urls[1]}: 256 tokens)\n" in capsys.readouterr().err
