"""What engines are told with each request: where it stands, and what it shares with how many others."""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np

from sgl_prefix_attn.offline.job_plan import JobPlan, Work
from sgl_prefix_attn.offline.messages import Task
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.queue_order import Place

INSTRUCTION, DOCUMENTS, QUESTIONS = 100, 3, 4


def plan(engines: int = 1, *, grouped: bool = True, samples: int = 1, alone: Collection[int] = ()) -> JobPlan:
    """An instruction for all, documents below it, questions below these, and a prompt of its own."""
    prompts = [
        [7] * INSTRUCTION + [50 + document] * 200 + [1000 + 10 * document + question] * 5
        for document in range(DOCUMENTS)
        for question in range(QUESTIONS)
    ]
    prompts.append([9] * 40)
    return JobPlan(work(prompts, samples, alone), engines, "job", grouped=grouped)


def work(prompts: list[list[int]], samples: int = 1, alone: Collection[int] = ()) -> Work:
    count = len(prompts)
    tasks = [Task(number, "/v1/completions", b"") for number in range(count)]
    limits, minimums, of_each = (np.full(count, value, dtype=np.int64) for value in (4, 9, samples))
    return Work(tasks, Prompts.from_lists(prompts), limits, minimums, of_each, frozenset(alone))


def places(plan: JobPlan, engine: int = 0) -> dict[int, Place]:
    tasks = iter(plan.queues[engine].next, None)
    return {task.number: Place.decode_list(task.place) for task in tasks if task.place is not None}


def shared(place: Place) -> list[tuple[int, int, int]]:
    return [prefix[1:] for prefix in place.prefixes]


def test_every_level_of_what_a_prompt_shares_is_said_with_its_uses():
    found = places(plan())
    for number in range(12):
        assert shared(found[number]) == [(0, INSTRUCTION, 12), (INSTRUCTION, INSTRUCTION + 200, QUESTIONS)]
    assert shared(found[12]) == []
    nodes = {found[number].prefixes[1].node for number in range(12)}
    assert len(nodes) == DOCUMENTS


def test_several_samples_use_the_prompt_once_more_to_compute_it():
    assert shared(places(plan(samples=3))[0]) == [
        (0, INSTRUCTION, 12 * 4),
        (INSTRUCTION, INSTRUCTION + 200, QUESTIONS * 4),
    ]


def test_each_engine_is_told_of_its_own_requests_only():
    split = plan(engines=2)
    uses = [places(split, engine) for engine in range(2)]
    sharing = [[place for place in found.values() if place.prefixes] for found in uses]
    assert sum(map(len, sharing)) == 12
    assert all(place.prefixes[0].uses == len(part) for part in sharing for place in part)


def test_requests_that_are_not_grouped_say_nothing():
    task = plan(grouped=False).queues[0].next()
    assert task is not None
    assert task.place is None


def test_a_request_that_stands_alone_gets_no_place():
    assert sorted(places(plan(alone={3}))) == [number for number in range(13) if number != 3]


def test_a_prompt_below_thousands_of_short_prefixes_takes_no_walk_through_them():
    prompts = [[7] * 40 + list(range(length)) for length in range(3000)]
    chain = JobPlan(work(prompts), 1, "job")
    started = time.process_time()
    found = places(chain)
    assert time.process_time() - started < 10  # with such a walk: about 25
    assert all(shared(place) == [(0, 40, 3000)] for place in found.values())
