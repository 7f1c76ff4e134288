"""The real server with a routing profile: the stock backend's tokens on both routes of a decode step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, NOTHING_TO_PACK, Launch, Tokens, packing, tokens_of
from tests.routing.profiles import write_profile

pytestmark = pytest.mark.e2e

# Steps run packed from about 312 (16 requests) to 343 tokens (one request) of the longest request on. The requests of
# `diverging` grow from 300 to 348, those of `ragged` are of all lengths.
COSTS = {"packed": {"launch": 1.0}, "stock": {"requests": 3.0, "longest_request": 2.9}}


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_profile(tmp_path_factory.mktemp("route"), **COSTS, kernels="cpu", backend="torch_native")
    environment = {"PREFIXPACK_ROUTE_PROFILE": path, "PREFIXPACK_ROUTE_MARGIN": "0"}
    with launch(BACKEND, environment=environment) as running:
        yield running


def test_tokens_are_those_of_the_stock_backend_while_routes_change(
    server: Server, expected: Callable[[Sequence[Request]], Tokens], vocabulary: Vocabulary
) -> None:
    for workload, both_routes in ((workloads.diverging, True), (workloads.ragged, False)):
        requests = workload(vocabulary)
        server.flush_cache()
        before = routed_steps(server)
        with packing(server) as done:
            answers = replay(server.url, requests)
        assert tokens_of(answers) == expected(requests)
        taken = routed_steps(server) - before
        assert taken["packed"] == done.steps["decode"]
        assert set(done.fallbacks) <= NOTHING_TO_PACK, "a step that was sent to the stock backend is no fallback"
        assert not both_routes or min(taken["packed"], taken["stock"]) > 3


def routed_steps(server: Server) -> Counter[str]:
    state = server.packing_state()
    assert state is not None
    return Counter(state["counters"]["routed_steps"])
