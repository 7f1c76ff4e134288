"""The real server with a routing profile: the stock backend's tokens, whichever way each decode step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, NOTHING_TO_PACK, Launch, Tokens, packing, tokens_of
from tests.routing.profiles import write_profile

pytestmark = pytest.mark.e2e

# With 16 requests, steps run packed from 325 tokens of the longest one on; with more of them earlier, with fewer later.
COSTS = {"packed": {"launch": 1.0}, "inner": {"requests": 25.0, "longest_request": 0.615}}


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_profile(tmp_path_factory.mktemp("route"), **COSTS, kernels="cpu", backend="torch_native")
    environment = {"PREFIXPACK_ROUTE_PROFILE": path, "PREFIXPACK_ROUTE_MARGIN": "0"}
    with launch(BACKEND, environment=environment) as running:
        yield running


@pytest.mark.parametrize("workload", ["diverging", "ragged"])
def test_tokens_are_those_of_the_stock_backend_while_routes_change(
    workload: str, server: Server, expected: Callable[[Sequence[Request]], Tokens], vocabulary: Vocabulary
) -> None:
    requests = workloads.ALL[workload](vocabulary)
    server.flush_cache()
    before = server.packing_state()
    with packing(server) as done:
        answers = replay(server.url, requests)
    after = server.packing_state()
    assert tokens_of(answers) == expected(requests)
    assert before is not None
    assert after is not None
    taken = {
        route: after["counters"]["routed_steps"][route] - before["counters"]["routed_steps"][route]
        for route in ("packed", "inner")
    }
    assert min(taken.values()) > 3, "both routes have to be taken for this to say anything"
    assert taken["packed"] == done.steps["decode"]
    assert set(done.fallbacks) <= NOTHING_TO_PACK, "a step that was sent to the inner backend is no fallback"
    assert after["route"]["setting"] == "auto"
    assert after["route"]["profile"] == "made by hand, commit none"


def test_without_a_profile_a_cpu_runs_packed(launch: Launch, vocabulary: Vocabulary) -> None:
    with launch(BACKEND) as server:
        replay(server.url, workloads.samples(vocabulary))
        state = server.packing_state()
    assert state is not None
    assert state["counters"]["steps_packed"]["decode"] > 0
    assert state["counters"]["routed_steps"] == {"packed": 0, "inner": 0}
    assert state["route"] == {"setting": "auto", "profile": None, "last": None, "graph_sizes": []}
