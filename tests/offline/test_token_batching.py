"""Whether steps mix prefills and decodes: by the engine, by what its prompts share, and by the user's word."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefix_attn.offline import engine_process
from sgl_prefix_attn.offline.messages import Go, Ready, Steps
from sgl_prefix_attn.offline.queue_order import STEPS_KEY
from sgl_prefix_attn.offline.token_batching import report, shared_part, why_not, window


def line(**body: Any) -> bytes:
    return json.dumps({"custom_id": "x", "body": body}).encode()


def test_the_part_of_the_text_that_prompts_share():
    shared, own = "s" * 3000, "o" * 1000
    alike = [line(prompt=f"{shared}{number}{own}") for number in range(10)]
    assert shared_part(alike) == pytest.approx(9 * 2048 / (10 * 4003))
    assert shared_part([line(prompt=f"{number}{shared}") for number in range(10)]) == 0
    chats = [line(messages=[{"role": "user", "content": "c" * 5000}], n=number) for number in range(4)]
    assert shared_part(chats) > 0.7
    assert shared_part([line(prompt=[5] * 1000)] * 2) > 0.4
    assert shared_part([]) == 0


ENGINE = {"device": "cuda", "attention_backend": "prefixpack"}


@pytest.mark.parametrize(
    ("changed", "head_dim", "kv_bytes", "shared", "reason"),
    [
        ({}, 128, 2, 0.9, ""),
        ({"device": "cpu"}, 128, 2, 0.9, "not known to be faster on cpu"),
        ({"attention_backend": "fa3"}, 128, 2, 0.9, "would not run packed"),
        ({}, 64, 2, 0.9, "not measured with head_dim 64 and 16-bit KV"),
        ({}, 128, 1, 0.9, "not measured with head_dim 128 and 8-bit KV"),
        ({}, 128, 2, 0.4, "share 40% of their text"),
    ],
)
def test_auto_mixes_where_steps_are_likely_to_run_packed(changed, head_dim, kv_bytes, shared, reason):
    told = why_not(SimpleNamespace(**{**ENGINE, **changed}), head_dim, kv_bytes, shared)
    assert told == reason or (reason and reason in told)


def test_auto_does_not_mix_where_the_setting_forbids_packed_mixed_steps(monkeypatch):
    monkeypatch.setenv("PREFIXPACK_PACK_MIXED", "false")
    assert "would not run packed" in why_not(SimpleNamespace(**ENGINE), 128, 2, 0.9)


def test_requests_at_once_are_what_the_smallest_pool_carries_and_half_of_it_to_wait():
    mixed = [Ready(0, pool=400_000), Ready(0, pool=200_000)]
    assert window(mixed, 100.0) == 3000
    assert window(mixed, 1.0) == 4096
    assert window(mixed, 10_000.0) == 512
    assert window([mixed[0], Ready(0, pool=200_000, unmixed="why")], 100.0) == 512


def test_the_report_has_what_engines_counted():
    engines = [Ready(0, chunk=64), Ready(0, chunk=64)]
    assert report(engines, 600, [Steps(3, 90, 1), Steps(1, 50, 1)]) == [
        "token batching is on: prefills and decodes share steps; up to 600 requests at once",
        "4 steps with 35.0 tokens on average; 50.0% had 90 % of the chunk of 64 or more",
    ]
    assert report([Ready(0, unmixed="why")], 512, []) == ["token batching is off: why; up to 512 requests at once"]
    assert report([], 0, []) == []


def test_counts_of_all_schedulers_are_added():
    states = [{STEPS_KEY: {"steps": counts}} for counts in ([3, 30, 1], [1, 5, 0])] + [{"other": {}}]
    assert engine_process._steps({"internal_states": states}) == Steps(4, 35, 1)
    assert engine_process._steps({"internal_states": [{}]}) == Steps()


@pytest.mark.parametrize(
    ("batching", "more", "mixes", "reason"),
    [
        ("off", "", False, "switched off"),
        ("auto", "", False, "not known to be faster on cpu"),
        ("on", "", True, ""),
        ("off", "--enable-mixed-chunk", True, ""),
        ("auto", "--enable-mixed-chunk --chunked-prefill-size 256", True, ""),
    ],
)
def test_the_users_arguments_win(batching, more, mixes, reason, monkeypatch):
    pytest.importorskip("sglang")
    from sglang.srt.plugins import load_plugins

    from sgl_prefix_attn.demo.tiny_model import tiny_model

    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    load_plugins()  # `prefixpack` has to be known
    given = f"--model-path {tiny_model()} --device cpu --attention-backend prefixpack {more}".split()
    args, told = engine_process._mixed(given, engine_process._server_args(given), Go(batching, 0.9))
    assert args.enable_mixed_chunk == mixes
    assert reason in told
    if "256" in more:
        assert args.chunked_prefill_size == 256
