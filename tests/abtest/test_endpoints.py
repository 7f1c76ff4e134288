"""The endpoint of live tests, with real commands and routers of data-parallel copies behind them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")
fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient  # noqa: E402
from sglang.srt.utils.auth import add_api_key_middleware  # noqa: E402

from sgl_prefix_attn.core.forest import PrefixForest  # noqa: E402
from sgl_prefix_attn.core.planner import ModelShape  # noqa: E402
from sgl_prefix_attn.routing.live_plan import LivePlan  # noqa: E402
from sgl_prefix_attn.settings import Settings  # noqa: E402
from sgl_prefix_attn.sglang_plugin.backend import live_commands, live_endpoints  # noqa: E402
from sgl_prefix_attn.sglang_plugin.dispatch import live_abtest  # noqa: E402
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters  # noqa: E402
from tests.support.schedulers import TokenizerManager, step_router  # noqa: E402

ABTEST = live_endpoints.PATH
PLAN = {"arms": ["packed", "stock"], "block_steps": 8, "warmup_steps": 2, "pairs": 4, "lease_steps": 16}


class Copy:
    """One data-parallel copy. ready: whether it has run a decode step. graphs: whether its steps run in graphs."""

    def __init__(
        self, *, ready: bool = True, graphs: bool = False, route: str = "auto", live: bool = True, drafts: int = 1
    ) -> None:
        shape, self.counters = ModelShape(4, 2, 64, kv_bytes=4) if ready else None, Counters()
        self.router = step_router(
            shape, "torch_native", kernels="cpu", drafts=drafts, graphs=graphs, counters=self.counters, route=route
        )
        record = SimpleNamespace(router=self.router)
        self.state: Any = SimpleNamespace(settings=Settings(live_tests=live), reported=lambda: record)

    def decode(self, steps: int) -> list[int | None]:
        """The arm of each of some decode steps."""
        forest = PrefixForest.from_paths([[(1, 0, 200)], [(1, 0, 200)]])
        paths: Any = SimpleNamespace(mode="decode", forest=forest)
        arms = []
        for _ in range(steps):
            if self.router.watches_steps:
                self.router.step_begins(True, 2)
                self.router.decide(paths, np.array([210, 220]))
            arms.append(self.router._arm)
        return arms


def client(*copies: Copy, admin_key: str | None = None) -> TestClient:
    def answers(request: Any) -> list[dict[str, Any]]:
        command = live_commands.command_of(request)
        return [{live_commands.ANSWER_KEY: live_commands.answer(command, copy.state)} for copy in copies]

    app = fastapi.FastAPI()
    live_endpoints.add_routes(app, lambda: TokenizerManager(answers))
    if admin_key is not None:
        add_api_key_middleware(app, api_key=None, admin_api_key=admin_key)
    return TestClient(app)


def error_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def test_data_parallel_copies_switch_each_by_its_own_steps() -> None:
    copies = Copy(), Copy()
    server = client(*copies)
    assert server.post(ABTEST, json=PLAN).status_code == 200
    order = np.repeat(LivePlan.model_validate(PLAN).order(), 8).tolist()
    assert copies[0].decode(12) == order[:12]
    assert copies[1].decode(5) == order[:5]
    assert [copy["steps_done"] for copy in server.get(ABTEST).json()["copies"]] == [12, 5]
    for copy, steps in ((copies[0], 12), (copies[1], 5)):
        copy.router.step_begins(False, 2)  # counts in the lease, not in the test
        assert copy.decode(15) == order[steps : steps + 15], "the read renewed the lease"
        assert copy.decode(1) == [None]
    assert [copy["status"] for copy in server.get(ABTEST).json()["copies"]] == ["expired", "expired"]
    for copy in copies:
        timed = [(arm, us, 2) for arm, us in zip(order, copy.router.live.us, strict=True) if us == us]
        for arm in (0, 1):
            seconds = sum(us for of, us, _ in timed if of == arm) / 1e6
            assert copy.counters.arm_step_seconds["AB"[arm]] == pytest.approx(seconds)
            assert copy.counters.arm_tokens["AB"[arm]] == sum(tokens for of, _, tokens in timed if of == arm) > 0


@pytest.mark.parametrize(
    ("ready", "why"),
    [
        (False, "no decode step has run yet: send the server a request first"),
        (True, "a live test is running; wait for its end, or stop it"),
    ],
)
def test_a_copy_that_refuses_starts_nothing_anywhere(ready: bool, why: str) -> None:
    early, late = Copy(), Copy(ready=ready)
    if ready:
        late.router.start_live(LivePlan.model_validate(PLAN))
    server = client(early, late)
    assert error_of(server.post(ABTEST, json=PLAN)) == (409, f"data-parallel copy 1 of 2: {why}")
    assert early.router.live is not None
    early.decode(1)
    assert not early.router.watches_steps, "the copy that had started has stopped"
    assert late.router.watches_steps == ready, "what another client had started goes on"


def silent(copy: Copy, seconds: float) -> None:
    """The client of what runs on a copy was not heard for so long."""
    copy.router.live.lease._heard -= seconds


def test_a_start_replaces_what_a_silent_client_has_left_on_an_idle_server() -> None:
    copies = Copy(), Copy()
    server = client(*copies)
    old = server.post(ABTEST, json=PLAN).json()["copies"][0]["token"]
    for copy in copies:
        silent(copy, 59)
    assert server.post(ABTEST, json=PLAN).status_code == 409
    silent(copies[0], 2)
    assert server.post(ABTEST, json=PLAN).status_code == 409, "the client was heard in one copy"
    left = [copy.router.live for copy in copies]
    silent(copies[1], 2)
    started = server.post(ABTEST, json=PLAN).json()["copies"]
    new = started[0]["token"]
    assert [copy["token"] for copy in started] == [new, new] != [old, old]
    assert [test.status for test in left if test is not None] == ["stopped", "stopped"]
    for method in ("GET", "DELETE"):
        assert error_of(server.request(method, ABTEST, params={"token": old}))[0] == 404
    assert {copy["status"] for copy in server.get(ABTEST, params={"token": new}).json()["copies"]} == {"running"}


def test_a_copy_whose_lease_ran_out_starts_with_one_that_is_replaced() -> None:
    busy, idle = Copy(), Copy()
    server = client(busy, idle)
    server.post(ABTEST, json=PLAN)
    busy.decode(17)
    silent(idle, 61)
    first, second = server.post(ABTEST, json=PLAN).json()["copies"]
    assert (first["status"], second["status"]) == ("running", "running")
    assert first["token"] == second["token"]


def test_ranks_replace_by_the_command_and_not_by_their_clocks() -> None:
    def start(rank: Copy, token: str, **fields: Any) -> dict[str, Any]:
        fields = {"action": live_commands.START, "plan": PLAN, "token": token, **fields}
        return live_commands.answer(fields, rank.state)

    ranks = Copy(), Copy()
    for rank in ranks:
        start(rank, "first")
    silent(ranks[0], 100)
    refused = [start(rank, "second") for rank in ranks]
    assert refused[0]["running"] == refused[1]["running"]
    assert refused[0]["silent_seconds"] > 99 > refused[1]["silent_seconds"]
    ask = {"action": live_commands.READ}
    for rank in ranks:
        live_commands.answer(ask, rank.state)  # the client is back
    assert all("error" in start(rank, "third", replace=[refused[0]["running"]]) for rank in ranks)
    now = start(ranks[0], "fourth")["running"]
    assert [start(rank, "fourth", replace=[now])["status"] for rank in ranks] == ["running", "running"]


def test_a_stopped_test_is_watched_for_one_step_more() -> None:
    copy = Copy()
    server = client(copy)
    server.post(ABTEST, json=PLAN)
    copy.decode(3)
    (state,) = server.delete(ABTEST).json()["copies"]
    assert (state["status"], state["steps_done"], len(state["us"])) == ("stopped", 3, 3)
    assert copy.router.watches_steps
    copy.decode(1)
    assert not copy.router.watches_steps


def test_an_answer_has_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_abtest, "ROWS_OF_AN_ANSWER", 5)
    copy = Copy()
    server = client(copy)
    server.post(ABTEST, json=PLAN)
    copy.decode(12)
    for first, rows in ((0, 5), (5, 5), (10, 2), (12, 0), (99, 0)):
        (state,) = server.get(ABTEST, params={"first": first}).json()["copies"]
        assert (state["first"], state["steps_done"]) == (min(first, 12), 12)
        assert {len(state[column]) for column in ("us", "requests", "packed")} == {rows}
    (state,) = server.delete(ABTEST).json()["copies"]
    assert (state["first"], len(state["us"])) == (0, 5)


JSON = "the body has to be a JSON object: "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", f"{JSON}it is of type list"),
        ({**PLAN, "pairs": 10**9}, "pairs: Input should be less than or equal to 10000"),
        ({**PLAN, "pairs": True}, "pairs: Input should be a valid integer"),
        ({**PLAN, "seed": 10**40}, "seed: Input should be a valid integer"),
        ({"arms": [1, 2]}, "arms.0: Input should be a valid string; arms.1: Input should be a valid string"),
        ({"arms": ["packed"] * 9}, "arms: Tuple should have at most 2 items after validation, not 9"),
        ({"arms": ["packed"] * 1500}, "the body has too many keys and strings: at most 32 are accepted"),
        ({"arms": ["packed", "packed" + " " * 9000 + "x"]}, "has 9007 characters; at most 200 are accepted"),
        ({"arms": ["packed", "&" * 200]}, "has 101 conditions; at most 8 are accepted"),
        ({"arms": ["packed", "x"]}, "'x' is not a routing policy"),
        ({str(number): 0 for number in range(30)}, "unknown key: '0', '1', '2', '3', '4', 25 more; accepted"),
        ({"k" * 9000: 0}, f"unknown key: '{'k' * 40}'; accepted: arms, "),
        (b"", JSON),
        (b"{", JSON),
        (b"\xff", JSON),
        (b'{"pairs": NaN}', JSON),
        pytest.param(b'{"arms": ' + b"[" * 960 + b"]" * 960 + b"}", "the body is nested", id="nested"),
        pytest.param(b"[" * 10_000, "the body is nested", id="nested deeper"),
    ],
)
def test_what_is_no_plan_reaches_no_scheduler(body: bytes | dict[str, Any], message: str) -> None:
    def answers(request: Any) -> list[dict[str, Any]]:
        raise AssertionError("sent")

    app = fastapi.FastAPI()
    live_endpoints.add_routes(app, lambda: TokenizerManager(answers))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, text = error_of(TestClient(app).post(ABTEST, content=content))
    assert (status, len(text) < 700) == (400, True)
    assert message in text


def test_bodies_and_queries_are_bounded() -> None:
    server = client(Copy())
    most = live_endpoints.MOST_BODY_BYTES
    large = error_of(server.post(ABTEST, content=b" " * (most + 1)))
    assert large == (413, f"the body is too large: at most {most} bytes are accepted")
    for method in ("GET", "DELETE"):
        for query, message in (
            ({"first": "9" * 400}, "first: "),
            ({"first": -1}, "first: Input should be greater than or equal to 0"),
            ({"first": "x"}, "first: Input should be a valid integer"),
            ({"token": "t" * 65}, "token: String should have at most 64 characters"),
            ({"tokens": 1}, "unknown parameter: 'tokens'; accepted: first, token"),
        ):
            status, text = error_of(server.request(method, ABTEST, params=query))
            assert status == 400
            assert text.startswith(message)
        assert error_of(server.request(method, ABTEST, params={"first": "9" * 600}))[0] == 414
    assert error_of(server.post(ABTEST, params={"first": 1}))[1] == "unknown parameter: 'first'; accepted: none"


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (Copy(graphs=True, route="packed"), "decode steps of this server have one route (route = packed), and"),
        (Copy(route="stock"), "start it with PREFIXPACK_ROUTE=auto, or another policy that is not fixed"),
        (Copy(ready=False), "no decode step has run yet: send the server a request first"),
        (Copy(drafts=4), "this server speculates: it has no decode steps"),
        (Copy(live=False), "live tests are off: start the server with PREFIXPACK_LIVE_TESTS=1"),
    ],
)
def test_servers_that_cannot_switch_say_what_to_change(copy: Copy, message: str) -> None:
    status, text = error_of(client(copy).post(ABTEST, json=PLAN))
    assert status in (409, 503)
    assert message in text


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_the_endpoint_follows_the_admin_key(method: str) -> None:
    server = client(Copy(), admin_key="secret")
    assert server.request(method, ABTEST, json=PLAN).status_code == 401
    assert server.request(method, ABTEST, json=PLAN, headers={"Authorization": "Bearer guess"}).status_code == 401
    known = server.request(method, ABTEST, json=PLAN, headers={"Authorization": "Bearer secret"})
    assert known.status_code in (200, 400, 404)


def test_schedulers_that_run_nothing_packed_refuse() -> None:
    silent = TokenizerManager(lambda request: [{}])
    (found,) = asyncio.run(live_endpoints.carried_out(silent, live_commands.READ))
    assert found["error"]["message"] == "the schedulers run no packed steps"
