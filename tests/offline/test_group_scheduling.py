"""The hooks on SGLang's real policy, admission, pools and radix cache, without a model."""

from __future__ import annotations

import contextlib
import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sglang")

from benchmarks.offline.cache_saving import grouped_jobs
from benchmarks.offline.replay import Job, Replay
from benchmarks.offline.workloads import Setting, industry
from sgl_prefix_attn.offline import engine_process
from sgl_prefix_attn.offline.engines import EngineArguments
from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER, Place
from sgl_prefix_attn.settings import load_settings
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import MOST_ROUNDS, OTHER_ORDER, GroupScheduler
from sgl_prefix_attn.sglang_plugin.telemetry import failures
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures

WORKLOADS = {
    "200/20 x16": Setting(200, 20, 16, 160).prompts(),
    "200/100 x2": Setting(200, 100, 2, 80).prompts(),
    "100/100 x4": Setting(100, 100, 4, 120).prompts(),
    "three levels": industry(60),
}


def tree_of(prompts) -> PrefixTree:
    return PrefixTree(Prompts.from_lists(prompts))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("output", [1, 20])
def test_nearly_all_that_can_be_saved_is_saved_with_a_tenth_of_the_memory(name, output):
    prompts = WORKLOADS[name]
    tree = tree_of(prompts)
    # A tenth, or what the longest request needs (SGLang reserves its whole output).
    pool = max(tree.unique_tokens // 10, max(map(len, prompts)) + output + 10)
    replay = Replay(pool, grouped=True)
    result = replay.run(grouped_jobs(prompts, tree, output))
    assert result.finished == len(prompts)
    assert result.saving >= 0.99 * tree.saving
    assert not replay.failures.counts
    plain = Replay(pool).run([Job(prompt, output) for prompt in prompts])
    assert plain.saving < result.saving


@pytest.mark.parametrize("seed", range(12))
def test_every_random_job_comes_to_its_end_and_gives_back_all_memory(seed):
    # Tiny pools, outputs that were estimated wrongly, requests of nobody's job in between: retractions are common.
    rng = random.Random(seed)
    prompts = Setting(rng.choice([40, 150]), rng.choice([5, 60]), rng.choice([2, 5, 16]), 60).prompts(seed=seed)
    outputs = [rng.randrange(1, 40) for _ in prompts]
    jobs = []
    for job in grouped_jobs(prompts, tree_of(prompts), rng.choice([1, 40])):
        number = prompts.index(list(job.prompt))
        plain = rng.random() < 0.2
        jobs.append(Job(job.prompt, outputs[number], None if plain else job.place))
    if rng.random() < 0.5:
        rng.shuffle(jobs)
    replay = Replay(
        rng.randrange(300, 600), max_running=rng.choice([4, 64]), grouped=True, window=rng.choice([8, None])
    )
    result = replay.run(jobs)  # raises for a hang, a leak, or KV that stays locked
    assert result.finished == len(jobs)
    assert not replay.failures.counts


class Policy:
    policy = "fcfs"
    enable_priority_scheduling = False


class Request:
    """What the hooks read of a Req."""

    def __init__(self, name: str, tokens: int = 100, place: Place | None = None, output: int = 0) -> None:
        self.name = name
        self.origin_input_ids = array("q", range(tokens))
        self.output_ids = array("q", range(output))
        self.prefix_indices = np.zeros(0)
        params = {CUSTOM_PARAMETER: place.encode(), "__req__": self} if place else None
        self.sampling_params = SimpleNamespace(custom_params=params, max_new_tokens=40)

    def finished(self) -> bool:
        return False


class Adder:
    def __init__(self, *, running: bool = True, room: int = 10_000) -> None:
        self.can_run_list: list[Request] = []
        self.running_batch = SimpleNamespace(is_empty=lambda: not running, reqs=[])
        self.rem_total_tokens = room
        self.new_token_ratio = 0.25


def in_job(*shared: int, tokens: int = 100) -> list[Request]:
    return [Request(f"j{n}", tokens, Place("job", n, s, 5)) for n, s in enumerate(shared)]


class Jobs:
    """The hooks of one scheduler, called as SGLang's queue calls them."""

    def __init__(self) -> None:
        self.record = Failures()
        self.scheduler = GroupScheduler(self.record)
        self.admission = Admission(self.record)
        self.admission.enlist(self.scheduler)

    def arranged(self, queue: list[Request], policy: object = Policy) -> list[str]:
        self.admission.after_calc_priority(None, policy, queue)
        return [request.name for request in queue]

    def admit(self, adder: Adder, request: Request) -> str:
        def original(adder: Adder, request: Request) -> str:
            adder.can_run_list.append(request)
            return "CONTINUE"

        verdict = self.admission.around_add_one_req(original, adder, request)
        return getattr(verdict, "name", verdict)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def test_a_job_stands_behind_the_others_in_its_own_order(jobs):
    first, second, third = in_job(0, 80, 0)
    queue = [third, Request("x"), second, first, Request("y")]
    same = queue
    assert jobs.arranged(queue) == ["x", "y", "j0", "j2", "j1"]
    assert same is queue


@pytest.mark.parametrize(("name", "priorities"), [("lpm", False), ("lof", False), ("fcfs", True)])
def test_another_order_that_the_user_wants_stays_and_is_told(jobs, name, priorities, caplog):
    policy = SimpleNamespace(policy=SimpleNamespace(value=name), enable_priority_scheduling=priorities)
    first, second = in_job(0, 80)
    assert jobs.arranged([Request("x"), Request("y")], policy) == ["x", "y"]
    assert jobs.record.disabled == {}
    for _ in range(2):
        assert jobs.arranged([second, first], policy) == ["j1", "j0"]
    assert jobs.admit(Adder(), second) == "CONTINUE"
    assert jobs.record.disabled == {"group_scheduling": OTHER_ORDER}
    assert len(caplog.records) == 1


def test_who_shares_a_prefix_under_way_is_held_back_with_other(jobs):
    queue = in_job(0, 80)
    jobs.arranged(queue)
    adder = Adder()
    assert jobs.admit(adder, queue[0]) == "CONTINUE"
    assert jobs.admit(adder, queue[1]) == "OTHER"
    assert jobs.scheduler.held_back == {"prefix": 1}
    assert jobs.admit(Adder(running=False), queue[1]) == "CONTINUE", "else nothing would ever run"


def test_claims_of_others_hold_a_request_back_for_some_rounds_only(jobs):
    hostile, honest, later = in_job(0, 80, 0)
    jobs.arranged([hostile, honest, later])
    jobs.admit(Adder(), hostile)  # its prefill never ends
    verdicts = [jobs.admit(Adder(room=125), honest) for _ in range(MOST_ROUNDS + 2)]
    assert verdicts == ["OTHER"] * MOST_ROUNDS + ["CONTINUE"] * 2
    # One that waits reserves 20 + 5 tokens. Memory that is not there is waited for as long as it takes.
    assert {jobs.admit(Adder(room=129), later) for _ in range(MOST_ROUNDS)} == {"OTHER"}
    assert {jobs.admit(Adder(room=104), later) for _ in range(9)} == {"OTHER"}
    assert jobs.admit(Adder(room=129), later) == "CONTINUE"


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_a_job_of_another_namespace_is_another_job_whatever_its_name(jobs, name):
    first, second = in_job(0, 80)
    setattr(first, name, "another tenant")
    jobs.arranged([first, second])
    adder = Adder()
    assert [jobs.admit(adder, request) for request in (first, second)] == ["CONTINUE"] * 2


def test_memory_of_members_that_wait_is_not_given_away(jobs):
    queue = in_job(0, 80, 80, 0)  # a group of three and one that needs 100 + 5 tokens
    jobs.arranged(queue)
    other = next(request for request in queue if request.name == "j3")
    # The two that wait need 2 x (20 + 5).
    assert jobs.admit(Adder(room=154), other) == "OTHER"
    assert jobs.admit(Adder(room=155), other) == "CONTINUE"
    assert jobs.scheduler.held_back == {"memory": 1}


def test_the_whole_expected_growth_of_running_members_is_left_free(jobs):
    queue = in_job(0)
    jobs.arranged(queue)
    adder = Adder()
    # Two members, expected to end after 30 and 5 more tokens; SGLang has reserved a quarter of the 35 to which each is
    # limited still. What a request of nobody's job may need is left to SGLang.
    members = [Request("j", place=Place("job", 9, 0, decode), output=5) for decode in (35, 10)]
    adder.running_batch.reqs = [Request("x", output=10), *members]
    beyond = (30 - 35 / 4) + (5 - 35 / 4)
    adder.rem_total_tokens = 105 + beyond - 1
    assert jobs.admit(adder, queue[0]) == "OTHER"
    again = Adder()
    again.running_batch.reqs = adder.running_batch.reqs
    again.rem_total_tokens = 105 + beyond
    assert jobs.admit(again, queue[0]) == "CONTINUE"


def test_after_a_failure_the_queue_is_sglangs_own(jobs, caplog):
    queue = in_job(0, 80)
    queue[1].output_ids = None  # what no request of SGLang's has
    assert jobs.arranged(queue) == ["j0", "j1"]
    assert jobs.arranged(queue) == ["j0", "j1"]
    assert [jobs.admit(Adder(), request) for request in queue] == ["CONTINUE"] * 2
    assert jobs.record.counts == {"group_scheduling": 1}
    assert set(jobs.record.disabled) == {"group_scheduling"}
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("ranks", [False, True])
def test_a_rank_alone_without_memory_does_not_go_on_with_another_queue_than_the_others(jobs, ranks, monkeypatch):
    def arrange(*_):
        raise MemoryError

    monkeypatch.setattr(failures, "several_ranks", lambda: ranks)
    monkeypatch.setattr(jobs.scheduler, "queue_ordered", arrange)
    with pytest.raises(MemoryError) if ranks else contextlib.nullcontext():
        jobs.arranged(in_job(0, 80))
    assert jobs.record.counts == {"group_scheduling": 1}


MALFORMED = [
    None,
    ["job", 0, 101, 1],  # of a prompt of 100 tokens
    ["job", 0, 0, 1, 0, 0, 101, 2],
    ["x" * 10**6, 0, 0, 1],
]


def saying(value: object) -> Request:
    request = Request("bad", place=Place("job", 0, 0, 5))
    request.sampling_params.custom_params[CUSTOM_PARAMETER] = value
    return request


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: repr(value)[:30])
def test_a_request_with_a_malformed_place_is_in_no_job_and_the_others_are_in_theirs(jobs, value, caplog):
    bad = saying(value)
    first, second, third = in_job(0, 80, 0)
    assert jobs.arranged([third, bad, second, first]) == ["bad", "j0", "j2", "j1"]
    adder = Adder()
    assert jobs.admit(adder, bad) == jobs.admit(adder, first) == "CONTINUE"
    assert jobs.admit(adder, second) == "OTHER"
    adder.running_batch.reqs = [bad]
    assert jobs.admit(adder, third) == "CONTINUE"
    assert (jobs.record.counts, jobs.scheduler.places.malformed) == ({}, 1)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "in an offline job" in record.getMessage()
    assert "expected" in record.getMessage()
    assert len(record.getMessage()) < 1000


def test_no_more_output_is_expected_than_a_request_may_generate(jobs):
    # Else it would not be admitted while anything runs, nor would any job behind it.
    greedy = Request("greedy", place=Place("a", 0, 0, 10**9))
    (other,) = in_job(0)
    jobs.arranged([greedy, other])
    assert jobs.admit(Adder(room=100 + 40), greedy) == "CONTINUE"


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "1"), ("", "1"), ("0", "0")])
def test_the_engine_of_a_batch_asks_for_them(set_by_user, expected, monkeypatch):
    class StartedError(Exception):
        pass

    def load_plugins():
        raise StartedError

    monkeypatch.setenv("PREFIXPACK_GROUP_SCHEDULING", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("PREFIXPACK_GROUP_SCHEDULING")
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", load_plugins)
    with pytest.raises(StartedError):
        engine_process.main(None, EngineArguments(()))
    assert load_settings().group_scheduling == (expected == "1")
