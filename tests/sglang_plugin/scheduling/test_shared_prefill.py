"""Requests that wait while another one computes their prefix, over SGLang's real admission, pools and radix cache."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
from sglang.srt.managers.schedule_policy import AddReqResult

from sgl_prefix_attn.sglang_plugin.scheduling import shared_prefill
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
from sgl_prefix_attn.sglang_plugin.scheduling.shared_prefill import LEAST_COMMON, WORTH_WAITING, SharedPrefill
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from tests.support.server_facts import server_facts


def groups(draw: random.Random) -> tuple[list[Any], int]:
    """Samples of prompts in a drawn order, some prompts below a system prompt; and the tokens of the distinct ones.

    The replay is skipped before SGLang 0.5.20. tests/e2e/test_shared_prefill.py covers those releases.
    """
    from benchmarks.offline.replay import Job

    system = [draw.randrange(1 << 20) for _ in range(draw.choice([0, 40, 700]))]
    prompts = [
        system * draw.randrange(2) + [draw.randrange(1 << 20) for _ in range(draw.randrange(1, 600))] for _ in range(8)
    ]
    jobs = [Job(prompt, draw.randrange(1, 40)) for prompt in prompts for _ in range(draw.randrange(1, 9))]
    if draw.random() < 0.5:
        draw.shuffle(jobs)
    return jobs, sum(map(len, prompts)) + len(system)


@pytest.mark.parametrize("seed", range(8))
def test_random_groups_end_and_compute_their_prompts_about_once(seed: int) -> None:
    from benchmarks.offline.replay import Replay

    draw = random.Random(seed)
    jobs, distinct = groups(draw)
    tight = draw.random() < 0.4
    pool = 4_000 if tight else 200_000
    both = {"max_running": draw.choice([8, 256]), "window": draw.choice([None, 30])}
    replay, plain = Replay(pool, shared_prefill=True, **both), Replay(pool, **both).run(jobs)
    result = replay.run(jobs)
    assert (replay.failures.counts, result.finished) == ({}, len(jobs))
    if not tight:  # else prompts are evicted and computed again; some tokens are not worth waiting for
        short = sum(len(job.prompt) for job in jobs if len(job.prompt) <= LEAST_COMMON + 1)
        assert result.computed_tokens <= distinct + len(jobs) + short + 8 * WORTH_WAITING
        assert result.computed_tokens <= plain.computed_tokens
        if both == {"max_running": 256, "window": None}:  # many samples arrive at once
            assert result.computed_tokens < 0.8 * plain.computed_tokens


class Waiting(SimpleNamespace):
    """A request: equal to itself alone, as SGLang's."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Rounds:
    """Admits every request that reaches it, as SGLang does with room for all."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.admission = Admission(self.counters.failures)
        self.admission.enlist(SharedPrefill(self.counters))
        self.running = SimpleNamespace(is_empty=lambda: False)

    def request(self, tokens: list[int], depth: int = 0, **fields: Any) -> Any:
        usual = {"extra_key": None, "return_logprob": False, "logprob_start_len": -1, "finished": lambda: False}
        ids = {"origin_input_ids": tokens, "output_ids": [], "prefix_indices": range(depth)}
        ids["last_node"] = int("1000")  # as SGLang's native tree gives it: equal, but another object each time
        return Waiting(**{**usual, **ids, **fields})

    def round(self, *requests: Any, chunked: Any = None, page: int = 1) -> list[str]:
        adder = SimpleNamespace(can_run_list=[chunked] if chunked else [], running_batch=self.running, page_size=page)

        def add(adder: Any, request: Any) -> AddReqResult:
            adder.can_run_list.append(request)
            return AddReqResult.CONTINUE

        verdicts = []
        for request in requests:
            verdict = self.admission.around_add_one_req(add, adder, request)
            verdicts.append("admitted" if adder.can_run_list[-1:] == [request] else verdict.name)
        return verdicts


PROMPT = list(range(1000))


def test_samples_wait_for_the_first_and_others_pass_them() -> None:
    world = Rounds()
    other = [-token for token in PROMPT]
    first, *rest = (world.request(PROMPT) for _ in range(4))
    assert world.round(first, *rest, world.request(other)) == ["admitted", *["CONTINUE"] * 3, "admitted"]
    assert world.round(*rest) == ["CONTINUE"] * 3  # overlap scheduling: the result has not come yet
    assert world.round(first, *rest) == ["admitted", *["CONTINUE"] * 3]  # SGLang took it back
    first.output_ids.append(1)
    assert world.round(*rest[:1]) == ["admitted"]
    assert world.counters.shared_prefill_waits == 9


def test_a_chunked_prompt_is_waited_for_until_its_last_chunk() -> None:
    world = Rounds()
    first, second = world.request(PROMPT), world.request(PROMPT)
    assert world.round(first, second) == ["admitted", "CONTINUE"]
    for depth in (300, 600, 960):
        first.last_node = second.last_node = object()
        first.prefix_indices = second.prefix_indices = range(depth)
        # The rest of the last chunk is shorter than what is worth waiting for.
        assert world.round(second, chunked=first) == ["CONTINUE" if depth < 960 else "admitted"]


def test_samples_wait_for_the_one_they_share_most_with() -> None:
    world = Rounds()
    other = PROMPT[:40] + [-token for token in PROMPT]
    requests = [world.request(tokens) for tokens in (PROMPT, other, other, PROMPT)]
    assert world.round(*requests) == ["admitted", "admitted", "CONTINUE", "CONTINUE"]


def test_some_tokens_are_computed_twice_before_others_wait() -> None:
    world = Rounds()
    assert world.round(*(world.request(PROMPT[:34]) for _ in range(4))) == ["admitted"] * 2 + ["CONTINUE"] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_key": "another adapter"},
        {"cache_salt": "another user"},
        {"return_logprob": True, "logprob_start_len": 0},
        {"input_embeds": [[0.0]]},
        {"positional_embed_overrides": object()},
        {"last_node": object()},
    ],
)
def test_requests_that_cannot_use_the_prefix_do_not_wait(fields: dict[str, Any]) -> None:
    world = Rounds()
    assert world.round(world.request(PROMPT), world.request(PROMPT, **fields)) == ["admitted", "admitted"]


@pytest.mark.parametrize(
    ("page", "common", "verdicts"),
    [
        (64, 63, ["admitted"] * 4),  # the tree will have no page of theirs
        (64, 64, ["admitted"] + ["CONTINUE"] * 3),
        (128, 127, ["admitted"] * 4),
        (128, 130, ["admitted"] + ["CONTINUE"] * 3),
        (16, 50, ["admitted"] * 2 + ["CONTINUE"] * 2),  # 48 tokens each
    ],
)
def test_requests_wait_for_whole_pages(page: int, common: int, verdicts: list[str]) -> None:
    world = Rounds()
    requests = [world.request(PROMPT[:common] + [-sample] * 300) for sample in range(1, 5)]
    assert world.round(*requests, page=page) == verdicts


def test_nobody_waits_for_a_prompt_that_is_not_of_tokens() -> None:
    world = Rounds()
    first = world.request(PROMPT, positional_embed_overrides=object())
    assert world.round(first, world.request(PROMPT)) == ["admitted"] * 2


def test_nobody_waits_for_a_prefill_that_is_lost_or_while_nothing_runs() -> None:
    world = Rounds()
    first, second = world.request(PROMPT), world.request(PROMPT)
    assert world.round(first) == ["admitted"]
    assert [world.round(second)[0] for _ in range(3)] == ["CONTINUE", "CONTINUE", "admitted"]
    world = Rounds()
    world.running.is_empty = lambda: True
    assert world.round(first) == world.round(second) == ["admitted"]


def test_a_request_waits_for_few_prefills_whose_kv_it_never_finds() -> None:
    world = Rounds()
    second = world.request(PROMPT)
    for _ in range(shared_prefill.MOST_WAITED_FOR):
        first = world.request(PROMPT)
        assert world.round(first, second) == ["admitted", "CONTINUE"]
        assert world.round(second) == ["CONTINUE"]
        first.output_ids.append(1)
    assert world.round(world.request(PROMPT), second) == ["admitted", "admitted"]


def test_a_round_looks_at_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefill, "MOST_PASSED_OVER", 3 * (shared_prefill.PASSED_OVER + len(PROMPT)))
    world = Rounds()
    requests = [world.request(PROMPT) for _ in range(4)]
    assert world.round(*requests) == ["admitted", "CONTINUE", "CONTINUE", "OTHER"]


@pytest.mark.parametrize(
    ("arguments", "waits"),
    [
        ({}, True),
        ({"min_free_slots_delay": 1, "speculative_algorithm": "DFLASH"}, True),
        ({"speculative_algorithm": "EAGLE"}, True),
        ({"min_free_slots_delay": 4}, False),
        ({"speculative_algorithm": "DFLASH"}, False),
        ({"enable_unified_cache_external_linker": True}, False),
        ({"radix_cache_backend": "another"}, False),
    ],
    ids=str,
)
def test_servers_on_which_requests_wait(arguments: dict[str, Any], waits: bool) -> None:
    assert (shared_prefill.why_none_waits(server_facts(**arguments)) is None) is waits


def test_after_an_exception_of_ours_admission_is_sglangs(caplog: pytest.LogCaptureFixture) -> None:
    world = Rounds()
    broken = world.request(PROMPT)
    del broken.last_node
    assert world.round(broken, world.request(PROMPT), world.request(PROMPT)) == ["admitted"] * 3
    assert world.counters.failures.counts == {"shared_prefill": 1}
    assert len(caplog.records) == 1
