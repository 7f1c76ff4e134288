"""Two tensor-parallel ranks of the real server decide alike, and their tokens are those of the stock backend on two.

Pins, retention with look-ahead, an offline group, users and a pool that is too small for all of it. Ranks that decide
differently would wait for each other for ever or compute nonsense; so each writes down what it decides
(rank_recorder.py), and both have to have written the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.demo.server import Server, ServerOptions, Starter, serve, start_process
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.offline.job_plan import JobPlan, Work
from sgl_prefix_attn.offline.messages import Task
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER
from tests.pinning import rank_recorder
from tests.pinning.test_server import ask
from tests.support import forked_server
from tests.support.ranks import TWO_RANKS

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
POOL = 2048
OURS = {
    "PREFIXPACK_GROUP_SCHEDULING": "1",
    "PREFIXPACK_PIN_BUDGET_PERCENT": "100",
    "PREFIXPACK_RETENTION": "reuse",
    "PREFIXPACK_RETENTION_BLOCK": "16",
    "PREFIXPACK_WRAP": "1",
    "PYTHONHASHSEED": "random",
}
# What has to have been decided, and so written down, for the comparison to say anything.
DECISIONS = {
    *("pinned", "locked", "released", "expired", "shed", "cleared", "announced", "ahead", "evicted", "step"),
    *("order", "waits", "may go", "passed over", "paths", "plan", "totals"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[Server, Server]]:
    """torch_native in wrap mode and as it is, with two ranks each.

    Ranks of the first are spawned: forks would have the same hash seed and addresses.
    """
    rank_recorder.install(folder)
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])

    def options(environment: dict[str, str], starter: Starter) -> ServerOptions:
        sizes = ("--context-length", "2048", "--max-total-tokens", str(POOL), "--max-running-requests", "12")
        return ServerOptions(
            model=str(tiny_model()), backend="torch_native", extra=("--tp-size", "2", *sizes),
            environment={**TWO_RANKS, **environment}, start_seconds=600, log_folder=folder, starter=starter,
        )  # fmt: skip

    recorded = {**OURS, "PYTHONPATH": path, rank_recorder.FOLDER: str(folder)}
    with contextlib.ExitStack() as running, ThreadPoolExecutor(2) as starting:
        both = [
            starting.submit(running.enter_context, serve(options(recorded, start_process))),
            starting.submit(running.enter_context, serve(options({}, forked_server.start))),
        ]
        yield both[0].result(), both[1].result()


class Requests:
    """What is asked of both servers."""

    def __init__(self) -> None:
        rng = random.Random(4)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(RESERVED_TOKENS, VOCABULARY) for _ in range(count)]

        self.prefixes = [tokens(length) for length in (400, 380, 350, 300, 250)]
        self.users = [
            self.body([*rng.choice(self.prefixes), *tokens(rng.randrange(5, 40))], rng.randrange(4, 24))
            for _ in range(36)
        ]
        self.large = self.body(tokens(1500), 2)
        # The last one is too short for requests to be passed over, and long enough for group scheduling to wait.
        groups = [tokens(length) for length in (220, 160, 120, 50)]
        prompts = [[*groups[number % 4], *tokens(rng.randrange(5, 30))] for number in range(24)]
        tasks = [Task(number, "/v1/completions", b"") for number in range(len(prompts))]
        eight, one = (np.full(len(prompts), value, dtype=np.int64) for value in (8, 1))
        (queue,) = JobPlan(Work(tasks, Prompts.from_lists(prompts), eight, eight, one), 1, "job").queues
        self.job = [
            self.body(prompts[task.number], 8, custom_params={CUSTOM_PARAMETER: task.place})
            for task in iter(queue.next, None)
        ]

    @staticmethod
    def body(tokens: list[int], new_tokens: int, **sampling: Any) -> dict[str, Any]:
        greedy = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
        return {"input_ids": tokens, "sampling_params": {**sampling, **greedy}}


def answer(server: Server, body: dict[str, Any]) -> list[int]:
    return list(json.loads(server.post("/generate", body, timeout=120))["output_ids"])


def answers(server: Server, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """In one message, so that they are in the queue together."""
    together = {name: [body[name] for body in bodies] for name in bodies[0]}
    return [result["output_ids"] for result in json.loads(server.post("/generate", together, timeout=120))]


def abort_long(server: Server, folder: Path) -> None:
    with rank_recorder.held(folder):
        server.post("/abort_request", {"rid": rank_recorder.LONG})


def pin(server: Server, tokens: list[int], **more: Any) -> int:
    status, answered = ask(server, "POST", {"token_ids": tokens, **more})
    assert status == 200, answered
    return int(answered["schedulers"][0]["pin"]["id"])


def events_of_both(folder: Path) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Rank 0 answers; the other one may need a moment to get where that one is."""
    deadline = time.monotonic() + 120
    own, lines = rank_recorder.events(folder)
    while len({len(rank) for rank in lines}) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
        own, lines = rank_recorder.events(folder)
    return own, lines


def test_two_ranks_decide_alike_and_the_tokens_are_those_of_the_stock_backend(servers, folder):
    ours, stock = servers
    requests = Requests()
    expected = answers(stock, [*requests.job, *requests.users])

    short = pin(ours, requests.prefixes[0][:40], label="released before the work starts")
    assert ask(ours, "DELETE", {"id": short})[0] == 200
    for prefix in requests.prefixes:
        answer(ours, requests.body(prefix, 1))
        pin(ours, prefix)
    answer(ours, requests.large)  # has to have some of what is pinned
    pin(ours, requests.job[0]["input_ids"][:100], ttl_steps=20)
    with ThreadPoolExecutor(len(requests.users) + 3) as users:
        long = users.submit(answer, ours, {**requests.body(requests.prefixes[1], 900), "rid": rank_recorder.LONG})
        abort = users.submit(abort_long, ours, folder)
        job = users.submit(answers, ours, requests.job)
        tokens = list(users.map(functools.partial(answer, ours), requests.users))
        tokens = [*job.result(), *tokens]
        abort.result()
        assert len(long.result()) < 900
    assert tokens == expected

    before = ours.info()["internal_states"][0]
    ours.flush_cache()
    # What the job announced is to stay when something has to go, though it was used least recently.
    assert answers(ours, requests.job[:1]) == expected[:1]
    for prompt in (requests.large["input_ids"][:750], requests.large["input_ids"][750:]):
        answer(ours, requests.body(prompt, 2))
        answer(ours, requests.body(prompt[::-1], 2))
    state = ours.info()["internal_states"][0]
    ours.flush_cache()
    # With places free and nothing cached, a pass meets several requests of a group whose prefix is still to come.
    assert answers(ours, requests.job) == expected[: len(requests.job)]

    assert state["prefixpack_pinning"]["failures"] == 0
    avoided = [s["prefixpack_pinning"]["evictions_avoided"] for s in (before, state)]
    assert avoided[0] < avoided[1]
    assert state["prefixpack"]["counters"]["steps_packed"]["decode"] > 20
    assert set(state["prefixpack"]["counters"]["fallbacks"]) <= {"idle"}

    kinds = rank_recorder.assert_alike(*events_of_both(folder))
    assert DECISIONS - kinds.keys() == set()
