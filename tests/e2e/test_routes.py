"""The real server with a routing policy: the stock backend's tokens on both routes of a decode step."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.abtest.client import Client, ServerRefusalError
from sgl_prefix_attn.abtest.live import report
from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from sgl_prefix_attn.routing.live_plan import LivePlan
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, NOTHING_TO_PACK, Launch, packing, state_of, tokens_of
from tests.support.pages import documented

pytestmark = pytest.mark.e2e

PAGE_URL = "http://127.0.0.1:30000"
POLICY = "batch>=2"


@pytest.fixture(scope="module")
def server(launch: Launch) -> Iterator[Server]:
    with launch(BACKEND, environment={"PREFIXPACK_ROUTE": POLICY, "PREFIXPACK_LIVE_TESTS": "1"}) as running:
        yield running


def with_a_long_one(vocabulary: Vocabulary) -> list[Request]:
    """A request that begins before all others and ends after them: it runs alone then."""
    others = workloads.diverging(vocabulary)
    return [Request("long", others[0].prompt, max_new_tokens=200), *others]


def test_tokens_are_those_of_the_stock_backend_while_routes_change(server, expected, vocabulary):
    for workload, both_routes in ((with_a_long_one, True), (workloads.ragged, False)):
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


def test_tokens_stay_the_same_while_arms_switch_every_16_steps(server, expected, vocabulary, tmp_path, capsys):
    """The arms take other routes; the test ends by itself, and the server then routes as before."""
    client = Client(server.url)
    requests = workloads.diverging(vocabulary)
    with pytest.raises(ServerRefusalError, match="no live test was started"):
        client.read()
    replay(server.url, requests[:2])
    client.start(LivePlan(arms=("packed", "stock"), block_steps=16, warmup_steps=2, pairs=2).model_dump())
    with pytest.raises(ServerRefusalError, match="a live test is running"):
        client.start(LivePlan(arms=("packed", "stock")).model_dump())
    for _ in range(3):
        server.flush_cache()
        assert tokens_of(replay(server.url, requests)) == expected(requests)
        copies = client.read()
    (copy,) = copies
    assert (copy["status"], copy["steps_done"]) == ("finished", 64)
    order = np.repeat(LivePlan(**copy["plan"]).order(), 16)
    assert set(np.array(copy["packed"])[order == 1].tolist()) == {0}
    assert np.array(copy["packed"])[order == 0].sum() > 16
    known = [us for us in copy["us"] if us is not None]
    assert len(known) > 56
    assert min(known) > 0
    verdict = report(copies, 0.01, tmp_path / "ab.json")
    assert verdict.pairs + verdict.dropped == 2
    assert json.loads((tmp_path / "ab.json").read_text())["verdict"]["winner"] is None
    assert "At least 8 pairs are needed" in capsys.readouterr().out
    route = state_of(server)["route"]
    assert route["policy"] == POLICY
    assert route["live"]["status"] == "finished"
    assert main(["explain", "--server", server.url]) == 0
    told = capsys.readouterr().out
    for index, (arm, would) in enumerate(zip(("packed", "stock"), route["live"]["would"], strict=True)):
        assert sum(would.values()) > 4
        assert f"arm {'AB'[index]}        {arm}; steps it would choose: {arm} {would[arm]}; last {arm}, " in told


def test_a_live_test_by_the_command_of_the_page(server, expected, vocabulary, tmp_path, capsys):
    requests, files = workloads.diverging(vocabulary), {PAGE_URL: server.url, "ab.json": tmp_path / "ab.json"}
    words = words_of(documented("python -m sgl_prefix_attn abtest live", files, "--pairs 4 --block 8 --warmup 2"))
    replay(server.url, requests[:2])
    while_running(server, words, lambda: tokens_of(replay(server.url, requests)) == expected(requests))
    out = capsys.readouterr().out
    assert re.findall(r"^([AB]) .* (\S+)$", out, re.MULTILINE) == [("A", "batch>=64"), ("B", "auto")]
    assert "At least 8 pairs are needed" in out
    assert json.loads((tmp_path / "ab.json").read_text())["verdict"]["pairs"] <= 4


def test_a_client_that_is_killed_leaves_nothing_behind(server, vocabulary, tmp_path):
    """The server is on its own policy again, within the lease."""
    words = ["live", server.url, "stock", "stock", "--lease", "16", "--out", str(tmp_path / "x")]
    with subprocess.Popen([sys.executable, "-m", "sgl_prefix_attn", "abtest", *words]) as client:
        wait_for(server, "running")
        client.kill()
    server.flush_cache()
    before = routed_steps(server)
    replay(server.url, [Request("alone", vocabulary.tokens(60, 48), max_new_tokens=30)])
    wait_for(server, "expired")
    replay(server.url, workloads.diverging(vocabulary))
    assert not list(tmp_path.iterdir())
    assert (routed_steps(server) - before)["packed"] > 3, "by the server's policy"
    (copy,) = Client(server.url).read()
    assert copy["steps_done"] == 15, "and one prefill step"


def test_two_servers_are_compared_by_the_same_requests(packed, stock_server, vocabulary, tmp_path, capsys):
    lines = [
        {"input_ids": vocabulary.tokens(60, 31, number), "max_new_tokens": 6, "n": 4} for number in range(2 * 10 + 1)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    urls = [packed.url, stock_server.url]
    hosts = {"http://host-a:30000": urls[0], "http://host-b:30000": urls[1]}
    files = {**hosts, "rollouts.jsonl": path, "ab.json": tmp_path / "x.json"}
    command = documented("python -m sgl_prefix_attn abtest servers", files, "--block 2")
    assert main(words_of(command)) == 0
    verdict = json.loads((tmp_path / "x.json").read_text())["verdict"]
    assert verdict["equal_tokens"] == 1.0
    assert verdict["comparison"]["pairs"] == 9
    assert [(arm["url"], arm["blocks"]) for arm in verdict["arms"]] == [(url, 9) for url in urls]
    assert min(arm[name] for arm in verdict["arms"] for name in ("tpot_ms", "ttft_ms", "tokens_per_s")) > 0
    assert set(verdict["orders"]) == {0, 1}
    assert len(verdict["tpot_ms"]) == 9
    assert "100.0% of the samples have equal tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_switch_at_the_same_step(launch: Launch, vocabulary: Vocabulary) -> None:
    environment = {
        "PREFIXPACK_LIVE_TESTS": "1", "PREFIXPACK_METRICS_FLUSH_STEPS": "1", "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }  # fmt: skip
    with launch(BACKEND, "--tp-size", "2", "--enable-metrics-for-all-schedulers", environment=environment) as server:
        replay(server.url, workloads.diverging(vocabulary)[:2])
        plan = LivePlan(arms=("packed", "stock"), block_steps=8, warmup_steps=2, pairs=2)
        client = Client(server.url)
        client.start(plan.model_dump())
        replay(server.url, workloads.diverging(vocabulary))
        (copy,) = client.read()
        assert copy["status"] == "finished"
        pattern = r'sglang:prefixpack_(arm|routed)_steps_total{(.*)tp_rank="(\d)"} (\S+)'
        found = re.findall(pattern, server.get("/metrics"))
    ranks = [{(kind, labels): steps for kind, labels, at, steps in found if at == rank} for rank in "01"]
    assert ranks[0] == ranks[1]
    assert {float(steps) for (kind, _), steps in ranks[0].items() if kind == "arm"} == {16.0}


def words_of(command: str) -> list[str]:
    """Arguments of our command line."""
    return shlex.split(command)[3:]


def while_running(server: Server, words: list[str], work: Callable[[], bool]) -> None:
    """Runs a live test and does work until it ends."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(main, words)
        wait_for(server, "running")
        while not done.done():
            assert work()
        assert done.result() == 0


def wait_for(server: Server, status: str) -> None:
    """Waits until the server's live test has a status."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = state_of(server)["route"]["live"]
        if found is not None and found["status"] == status:
            return
        time.sleep(0.1)
    raise AssertionError(f"no live test is {status} within two minutes")


def routed_steps(server: Server) -> Counter[str]:
    return Counter(state_of(server)["counters"]["routed_steps"])
