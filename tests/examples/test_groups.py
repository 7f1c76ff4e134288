"""The recipes of `examples/`, without a cluster: keys, the policy with its bound, and what each recipe sends."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.sglang_router import HEADER, request
from examples.slime_groups import share_sessions
from examples.verl_balancer import GroupBalancer, request_id
from sgl_prefix_attn.group_routing import GroupRouter, group_key

SERVERS = ["a", "b", "c", "d"]


@given(st.lists(st.integers(0, 2**40)), st.lists(st.integers(0, 2**40)))
def test_keys_differ_as_prompts_do(one: list[int], other: list[int]) -> None:
    assert (group_key(one) == group_key(other)) == (one == other)
    assert group_key(one) == group_key(tuple(one))


def test_a_key_is_the_same_in_every_process() -> None:
    code = "from sgl_prefix_attn.group_routing import group_key; print(group_key('a prompt'), group_key([1, 2]))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == [group_key("a prompt"), group_key([1, 2])]


def test_groups_sent_together_stay_together_and_fill_all_servers() -> None:
    router = GroupRouter(SERVERS)
    servers = [{router.acquire(prompt) for _ in range(16)} for prompt in range(16)]
    assert all(len(used) == 1 for used in servers)
    assert set(router.in_flight.values()) == {64}
    assert router.moved == 0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=300),
    st.floats(1.0, 2.0),
    st.integers(0, 8),
)
def test_no_request_goes_to_a_server_beyond_the_bound(steps: list[tuple[int, bool]], bound: float, slack: int) -> None:
    router = GroupRouter(SERVERS, load_bound=bound, slack=slack)
    running: list[str] = []
    for key, ends in steps:
        if ends and running:
            router.release(running.pop(0))
        else:
            server = router.acquire(key)
            running.append(server)
            mean = len(running) / len(SERVERS)
            assert router.in_flight[server] <= max(bound * mean + slack, mean + 1)
        assert sum(router.in_flight.values()) == len(running)


def test_a_group_larger_than_its_share_moves_on() -> None:
    router = GroupRouter(SERVERS, slack=4)
    for _ in range(100):
        router.acquire("one prompt")
    assert max(router.in_flight.values()) <= 1.25 * 25 + 4
    assert router.moved > 0


def test_a_group_moves_with_its_server() -> None:
    router = GroupRouter(SERVERS)
    first = router.acquire("group")
    router.release(first)
    assert router.acquire("group") == first
    router.remove(first)
    assert router.acquire("group") != first
    router.add(first)
    assert router.in_flight[first] == 0


def test_old_groups_are_forgotten() -> None:
    router = GroupRouter(SERVERS, keys_kept=2)
    for key in range(10):
        router.acquire(key)
    assert list(router._server_of) == [8, 9]


@pytest.mark.parametrize(("servers", "bound"), [([], 1.25), (SERVERS, 0.9), (SERVERS, float("nan"))])
def test_what_makes_no_sense_is_refused(servers: list[str], bound: float) -> None:
    with pytest.raises(ValueError, match=r"at least one server|load_bound="):
        GroupRouter(servers, load_bound=bound)


@pytest.mark.parametrize(("prompt", "field"), [("a text", "text"), ([5, 6], "input_ids")])
def test_the_router_gets_the_groups_key(prompt: Any, field: str) -> None:
    sent = [request("http://router:1/", prompt, {"temperature": 1}) for _ in range(2)]
    assert {one.get_header(HEADER.capitalize()) for one in sent} == {group_key(prompt)}
    assert sent[0].full_url == "http://router:1/generate"
    assert json.loads(bytes(sent[0].data))[field] == prompt  # type: ignore[arg-type]


def test_slimes_samples_share_a_session() -> None:
    def group(prompt: str, *sessions: str | None) -> list[Any]:
        return [SimpleNamespace(prompt=prompt, session_id=session) for session in sessions]

    groups = [group("x", None, None), group("y", None, None), group("z", "own", None), []]
    share_sessions(groups)
    ids = [[sample.session_id for sample in samples] for samples in groups]
    assert ids == [[group_key("x")] * 2, [group_key("y")] * 2, ["own", "own"], []]


def test_verls_balancer_pins_groups_and_counts() -> None:
    balancer = GroupBalancer({server: object() for server in SERVERS})
    first = balancer.acquire_server(request_id("uid-1", 0))
    balancer.release_server(first)
    other = balancer.acquire_server("another request")
    assert balancer.acquire_server(request_id("uid-1", 1)) == first
    assert sum(balancer._router.in_flight.values()) == 2
    balancer.release_server(other)
    balancer.release_server(other)
    assert min(balancer._router.in_flight.values()) == 0
