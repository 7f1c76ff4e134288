"""Workloads: deterministic tokens, and sharing that is exactly the trace's."""

from __future__ import annotations

import itertools
import math

import pytest

from sgl_prefix_attn.demo.workload import TRACE_SLICE, Vocabulary, diverging_group, trace_requests
from sgl_prefix_attn.trace import TraceRow, read_trace

VOCABULARY = Vocabulary(10, 1024)


def common(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def row(*hashes: int, at: int = 0) -> TraceRow:
    return TraceRow(timestamp=at, input_length=512 * len(hashes), output_length=10, hash_ids=list(hashes))


def test_prompts_share_exactly_the_blocks_whose_hashes_agree() -> None:
    rows = read_trace(TRACE_SLICE, limit=60)
    requests = trace_requests(rows, VOCABULARY, 4096)
    block = min(4096 // len(row.hash_ids) for row in rows)
    for (row_a, a), (row_b, b) in itertools.combinations(zip(rows, requests, strict=True), 2):
        blocks = common(tuple(row_a.hash_ids), tuple(row_b.hash_ids))
        shared = common(a.prompt, b.prompt)
        ends = min(len(a.prompt), len(b.prompt))
        # Behind the last equal block, unequal ones may begin with the same few tokens by chance.
        assert min(blocks * (block - 2), ends) <= shared <= min(blocks * block + 2, ends)


def test_blocks_outputs_and_arrivals_are_scaled() -> None:
    assert len(trace_requests([row(1, 2)], VOCABULARY, 100_000)[0].prompt) == 1024, "at most the trace's block"
    requests = trace_requests([row(1, at=4000), row(2, at=10_000)], VOCABULARY, 1000, speed=4, output_scale=0.001)
    assert [request.arrival_seconds for request in requests] == [0.0, 1.5]
    assert [request.max_new_tokens for request in requests] == [1, 1]


@pytest.mark.parametrize(
    ("option", "value", "context"),
    [("speed", 0.0, 1000), ("speed", math.nan, 1000), ("output_scale", -1.0, 1000), ("context_length=20", None, 20)],
)
def test_unusable_factors_and_context_length(option: str, value: float | None, context: int) -> None:
    options = {} if value is None else {option: value}
    with pytest.raises(ValueError, match=option):
        trace_requests([row(1), row(*range(11))], VOCABULARY, context, **options)


def test_a_diverging_group_has_one_prompt_and_a_bias_of_its_own_for_each_sample() -> None:
    requests = diverging_group(VOCABULARY, 100, 8, samples=5)
    assert len({request.prompt for request in requests}) == 1
    assert len({request.logit_bias for request in requests}) == 5
    assert requests == diverging_group(VOCABULARY, 100, 8, samples=5)
    bias = requests[0].body()["sampling_params"]["logit_bias"]
    assert sorted(map(int, bias)) == list(range(10, 1024))
