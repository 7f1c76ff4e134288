"""Workloads of the serving benchmark: sizes, sharing, arrivals, bad arguments."""

from __future__ import annotations

from collections import Counter

from benchmarks.serving.workloads import Sizes, make_requests
from sgl_prefix_attn.demo.workload import Vocabulary

VOCABULARY = Vocabulary(10, 1000)
CONTEXT = 8192


def test_shared_prefix_groups_share_their_system_prompt_and_nothing_else() -> None:
    requests = make_requests("shared-prefix", Sizes(groups=4, samples=5, prompt_tokens=64), VOCABULARY, CONTEXT)
    assert Counter(Counter(request.prompt[:64] for request in requests).values()) == {5: 4}
    assert len({request.prompt[64:] for request in requests}) == 20
    assert {len(request.prompt) for request in requests} == {64 + 128}
    assert [request.name for request in requests] != sorted(request.name for request in requests)
