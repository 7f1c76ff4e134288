"""The recipes of `examples/`, without a cluster: keys, the policy with its bound, and what each recipe sends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.sglang_router import HEADER, request
from examples.slime_groups import keep_groups_together, share_sessions
from examples.verl_balancer import GroupBalancer, request_id
from sgl_prefix_attn.group_routing import GroupRouter, group_key

SERVERS = ["a", "b", "c", "d"]


@given(st.lists(st.integers(0, 2**40)), st.lists(st.integers(0, 2**40)))
def test_keys_differ_as_prompts_do(one: list[int], other: list[int]) -> None:
    assert (group_key(one) == group_key(other)) == (one == other)
    assert group_key(one) == group_key(tuple(one))


def test_half_a_surrogate_pair_has_a_key() -> None:
    """JSON can hold one."""
    assert group_key("\ud800") != group_key("\ud801")


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


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=300), st.floats(1.0, 2.0), st.integers(0, 8))
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


@pytest.mark.parametrize("bound", [0.9, float("nan")])
def test_what_makes_no_sense_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="load_bound="):
        GroupRouter(SERVERS, load_bound=bound)


def test_a_router_may_have_no_server_for_a_while() -> None:
    router = GroupRouter([])
    with pytest.raises(RuntimeError, match="no server"):
        router.acquire("group")
    router.add("a")
    assert router.acquire("group") == "a"
    router.remove("a")
    assert router.in_flight == {}


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


def test_slimes_rollout_sends_the_groups_key() -> None:
    """With a stand-in for slime's module, which sends the key under its own condition."""
    sent: list[Any] = []

    async def generate_and_rm_group(args: Any, group: list[Any], sampling_params: Any, evaluation: bool = False) -> Any:
        sent.extend(sample.session_id for sample in group if args.router_policy == "consistent_hashing")
        return group

    rollout = SimpleNamespace(generate_and_rm_group=generate_and_rm_group)
    keep_groups_together(rollout)
    args = SimpleNamespace(router_policy="manual")
    group = [SimpleNamespace(prompt="x", session_id=None) for _ in range(3)]
    assert asyncio.run(rollout.generate_and_rm_group(args, group, {}, evaluation=True)) == group
    assert sent == [group_key("x")] * 3
    assert args.router_policy == "manual"


def test_verls_balancer_pins_groups_and_counts() -> None:
    handles = {server: object() for server in SERVERS}
    balancer = GroupBalancer(handles, {"load_bound": 1.5, "full_determinism": False})
    first, handle = balancer.acquire_server(request_id("uid-1", 0))
    assert handle is handles[first]
    balancer.release_server(first)
    other, _ = balancer.acquire_server("another request")
    assert balancer.acquire_server(request_id("uid-1", 1))[0] == first
    assert sum(balancer.get_status()["servers"].values()) == 2
    balancer.release_server(other)
    assert sum(balancer.get_status()["servers"].values()) == 1


def test_verls_balancer_knows_a_group_by_its_prompt_and_its_later_turns() -> None:
    balancer = GroupBalancer(dict.fromkeys(SERVERS))
    group = {balancer.acquire_server(f"uuid-{sample}", [5, 6, 7])[0] for sample in range(8)}
    other, _ = balancer.acquire_server("uuid-other", [8])
    assert len(group) == 1
    assert other not in group
    for sample in range(8):
        assert balancer.acquire_server(f"uuid-{sample}", [5, 6, 7, 100 + sample])[0] in group
    balancer.remove_servers(group)
    assert balancer.acquire_server("uuid-0", [5, 6, 7, 100, 9])[0] not in group
    balancer.add_servers(dict.fromkeys(group))
    assert sorted(balancer.get_all_servers()) == SERVERS


class VerlsClient:
    """Asks a balancer as `LLMServerClient` of verl 0.9.1 does: with the fields that the balancer declares."""

    def __init__(self, balancer: GroupBalancer) -> None:
        self.balancer = balancer
        self.acquire, self.release = balancer.require_acquire_fields(), balancer.require_release_fields()

    def start(self, request_id: str, **generate: Any) -> str:
        fields = {name: generate[name] for name in self.acquire if name in generate}
        return self.balancer.acquire_server(request_id=request_id, **fields)[0]

    def end(self, server_id: str, request_id: str) -> None:
        pool = {"request_id": request_id}
        self.balancer.release_server(server_id=server_id, **{name: pool[name] for name in self.release})


def test_verls_client_hands_over_what_the_balancer_needs() -> None:
    client = VerlsClient(GroupBalancer(dict.fromkeys(SERVERS), {"router_class": "x"}))
    group = [client.start(f"uuid-{sample}", prompt_ids=[5, 6], sampling_params={}, image_data=None) for sample in "abc"]
    assert len(set(group)) == 1
    assert client.balancer.get_total_inflight() == 3
    client.end(group[0], "uuid-a")
    status = client.balancer.get_status()
    assert (status["total_inflight"], status["active_servers"]) == (2, len(SERVERS))


def test_verls_balancer_starts_empty_and_says_so_in_verls_words() -> None:
    balancer = GroupBalancer({}, max_cache_size=10)
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        balancer.acquire_server("uuid", [5])
    balancer.add_servers({"a": "handle"})
    assert balancer.acquire_server("uuid", [5]) == ("a", "handle")
    balancer.remove_servers(["a"])
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        balancer.acquire_server("uuid", [5])


def test_a_group_stays_one_when_verl_rebalances_interrupted_requests() -> None:
    balancer = GroupBalancer({"old": None})
    for sample in range(4):
        balancer.acquire_server(f"uuid-{sample}", [5, 6])
    balancer.add_servers({"new": None})
    assert balancer.clear_sticky_cache() == {"cleared_entries": 1, "server_loads": {"old": 4, "new": 0}}
    # Each is sent again with the tokens that it has by now.
    assert {balancer.acquire_server(f"uuid-{sample}", [5, 6, sample])[0] for sample in range(4)} == {"new"}
