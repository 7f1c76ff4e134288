"""Workloads of the serving benchmark: sizes, sharing, arrivals, bad arguments."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving.workloads import CONVERSATION_LEVELS, WORKLOADS, Sizes, make_requests
from sgl_prefix_attn.demo.workload import Vocabulary

VOCABULARY = Vocabulary(10, 1000)
CONTEXT = 8192


def test_reinforcement_learning_groups_have_one_prompt_each() -> None:
    requests = make_requests("rl", Sizes(), VOCABULARY, CONTEXT)
    assert len({request.prompt for request in requests}) == len(requests) == 64
    assert {(len(r.prompt), r.samples, r.max_new_tokens, r.arrival_seconds) for r in requests} == {(4096, 16, 256, 0.0)}


def test_prompts_without_sharing_have_nothing_in_common() -> None:
    requests = make_requests("no-sharing", Sizes(requests=20, prompt_tokens=32), VOCABULARY, CONTEXT)
    assert len({request.prompt[:4] for request in requests}) == 20
    assert {(len(request.prompt), request.samples) for request in requests} == {(32, 1)}


def test_shared_prefix_groups_share_their_system_prompt_and_nothing_else() -> None:
    requests = make_requests("shared-prefix", Sizes(groups=4, samples=5, prompt_tokens=64), VOCABULARY, CONTEXT)
    assert Counter(Counter(request.prompt[:64] for request in requests).values()) == {5: 4}
    assert len({request.prompt[64:] for request in requests}) == 20
    assert {len(request.prompt) for request in requests} == {64 + 128}
    assert [request.name for request in requests] != sorted(request.name for request in requests)


def test_conversation_prompts_branch_after_the_first_and_the_second_level() -> None:
    requests = make_requests("conversation", Sizes(requests=100), VOCABULARY, CONTEXT)
    first, second, third = np.cumsum(CONVERSATION_LEVELS).tolist()
    counts = [len({request.prompt[:end] for request in requests}) for end in (first, second, third)]
    assert counts == [1, 2, 4]
    assert len({request.prompt[third:] for request in requests}) == 100
    medians = [np.median([len(r.prompt) - third for r in requests]), np.median([r.max_new_tokens for r in requests])]
    assert medians == pytest.approx([560, 340], rel=0.5)


def test_the_trace_arrives_at_the_rate() -> None:
    requests = make_requests("mooncake", Sizes(requests=150, rate=5.0, output_tokens=20), VOCABULARY, CONTEXT)
    assert requests[-1].arrival_seconds == pytest.approx(150 / 5.0)
    assert max(request.max_new_tokens for request in requests) == 20
    assert max(len(request.prompt) for request in requests) <= CONTEXT


@pytest.mark.parametrize("workload", ["rl", "conversation"])
def test_arrivals_are_a_poisson_process_of_the_rate(workload: str) -> None:
    sizes = Sizes(groups=400, requests=400, rate=20.0, prompt_tokens=4)
    times = [request.arrival_seconds for request in make_requests(workload, sizes, VOCABULARY, CONTEXT)]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400 / 20, rel=0.2)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_seed_decides_all(workload: str) -> None:
    sizes = Sizes(groups=2, samples=2, requests=5, prompt_tokens=16)
    assert make_requests(workload, sizes, VOCABULARY, CONTEXT) == make_requests(workload, sizes, VOCABULARY, CONTEXT)


def test_bad_sizes_are_refused(tmp_path: Path) -> None:
    for workload, sizes, message in (
        ("rl", Sizes(groups=-1), "groups is -1"),
        ("chat", Sizes(), "no workload 'chat'"),
        ("rl", Sizes(prompt_tokens=CONTEXT), "needs 8448 tokens"),
        ("mooncake", Sizes(trace=tmp_path / "none"), "none"),
    ):
        with pytest.raises(ValueError, match=message):
            make_requests(workload, sizes, VOCABULARY, CONTEXT)
