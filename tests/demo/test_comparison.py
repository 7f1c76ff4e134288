"""The comparison of two backends: identical tokens, latencies, KV reads, table and record."""

from __future__ import annotations

import json

import pytest

from sgl_prefix_attn.demo.client import Answer, Sample
from sgl_prefix_attn.demo.comparison import Comparison, KVReads, Measurement, table
from sgl_prefix_attn.demo.workload import Request


def measurement(backend: str, *tokens: list[int], kv: KVReads | None = None) -> Measurement:
    answers = tuple(
        Answer(Request(f"r{number}", (1, 2, 3), 3), (Sample("id", generated, 0, 0, "length", first=0.1, last=0.3),))
        for number, generated in enumerate(tokens)
    )
    return Measurement(backend, answers, 1.0, kv, {})


def comparison(packed: list[int], stock: list[int]) -> Comparison:
    kv = KVReads(read=300, per_request=400, unique=200)
    return Comparison("work", measurement("stock", [5], stock), measurement("packed", [5], packed, kv=kv))


@pytest.mark.parametrize(
    ("packed", "same", "total", "position"),
    [([1, 2, 3], 4, 4, None), ([1, 9, 3], 3, 4, 1), ([1, 2], 3, 4, 2), ([1, 2, 3, 4], 4, 5, 3), ([], 1, 4, 0)],
)
def test_a_difference_is_counted_and_located(packed: list[int], same: int, total: int, position: int | None) -> None:
    compared = comparison(packed, [1, 2, 3])
    assert compared.tokens() == (same, total)
    assert compared.identical == (position is None)
    located = [] if position is None else [f"r1, sample 0: from generated token {position} on"]
    assert compared.differences() == located


def test_latencies_are_in_milliseconds() -> None:
    run = measurement("stock", [1, 2, 3], [1])
    assert run.first_token_ms(50) == pytest.approx(100)
    assert run.output_token_ms(50) == pytest.approx(100)  # the sample of one token has none


def test_kv_reads_are_counted_between_two_states() -> None:
    before = {"counters": {"kv_tokens_read": 10, "kv_tokens_per_request": 20, "kv_tokens_unique": 5}}
    after = {"counters": {"kv_tokens_read": 40, "kv_tokens_per_request": 140, "kv_tokens_unique": 25}}
    kv = KVReads.between(before, after)
    assert kv == KVReads(read=30, per_request=120, unique=20)
    assert kv.saved == 0.75
    assert KVReads(0, 0, 0).saved == 0.0


def test_table_and_record() -> None:
    same = comparison([1, 2, 3], [1, 2, 3])
    lines = table([same]).splitlines()
    assert len(lines) == 4
    assert "4/4" in lines[3]
    assert "25.0% (300 of 400)" in lines[3]
    record = json.loads(json.dumps(same.as_json()))
    assert record["tokens_identical"] == record["tokens"] == 4
    assert record["runs"][1]["kv_tokens"]["saved"] == 0.25
