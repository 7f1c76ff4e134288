"""What engines are told with each request: where it stands, and what it shares with how many others."""

from __future__ import annotations

import time

import numpy as np

from sgl_prefix_attn.offline.batch_file import BatchRequest, CompletionBody
from sgl_prefix_attn.offline.job_plan import JobPlan, Work
from sgl_prefix_attn.offline.prompts import Prompts
from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER, Place

INSTRUCTION, DOCUMENTS, QUESTIONS = 100, 3, 4


def plan(engines: int = 1, *, grouped: bool = True, **body: int) -> JobPlan:
    """An instruction for all, documents below it, questions below these, and a prompt of its own."""
    prompts = [
        [7] * INSTRUCTION + [50 + document] * 200 + [1000 + 10 * document + question] * 5
        for document in range(DOCUMENTS)
        for question in range(QUESTIONS)
    ]
    prompts.append([9] * 40)
    requests = [
        BatchRequest(line, str(line), "/v1/completions", CompletionBody(prompt=prompt, max_tokens=4, **body))
        for line, prompt in enumerate(prompts)
    ]
    limits = np.full(len(prompts), 4, dtype=np.int64)
    return JobPlan(Work(requests, Prompts.from_lists(prompts), limits), engines, "job", grouped=grouped)


def places(plan: JobPlan, engine: int = 0) -> dict[int, Place]:
    tasks = iter(plan.queues[engine].next, None)
    return {task.number: Place.decode_list(task.sampling["custom_params"][CUSTOM_PARAMETER]) for task in tasks}


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
    assert shared(places(plan(n=3))[0]) == [(0, INSTRUCTION, 12 * 4), (INSTRUCTION, INSTRUCTION + 200, QUESTIONS * 4)]


def test_each_engine_is_told_of_its_own_requests_only():
    split = plan(engines=2)
    uses = [places(split, engine) for engine in range(2)]
    sharing = [[place for place in found.values() if place.prefixes] for found in uses]
    assert sum(map(len, sharing)) == 12
    assert all(place.prefixes[0].uses == len(part) for part in sharing for place in part)


def test_requests_that_are_not_grouped_say_nothing():
    task = plan(grouped=False).queues[0].next()
    assert task is not None
    assert "custom_params" not in task.sampling


def test_a_prompt_below_thousands_of_short_prefixes_takes_no_walk_through_them():
    prompts = [[7] * 40 + list(range(length)) for length in range(3000)]
    requests = [BatchRequest(line, str(line), "/v1/completions", CompletionBody(prompt=[1])) for line in range(3000)]
    limits = np.full(len(prompts), 4, dtype=np.int64)
    chain = JobPlan(Work(requests, Prompts.from_lists(prompts), limits), 1, "job")
    started = time.process_time()
    found = places(chain)
    assert time.process_time() - started < 10  # with such a walk: about 25
    assert all(shared(place) == [(0, 40, 3000)] for place in found.values())
