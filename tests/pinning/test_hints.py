"""The check of KV hints where requests are made: what the scheduler gets, and what is refused."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt.managers.kv_hints")

from sglang.srt.managers.kv_hints import KvHintsEnvelope, decode_kv_hints_envelope

from sgl_prefix_attn.sglang_plugin.pinning.hints import MAX_ACTIONS, OURS, HintCompiler, Hints, compiled, hints_of
from sgl_prefix_attn.sglang_plugin.pinning.registration import why_not_read


def envelope(*actions: tuple[str, str, Any]) -> KvHintsEnvelope:
    given = [
        {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
        for kind, version, payload in actions
    ]
    return decode_kv_hints_envelope({"protocol_version": "0.1", "message_id": "m", "actions": given})


def read(*actions: tuple[str, str, Any]) -> Hints:
    hints = hints_of(SimpleNamespace(kv_hints=compiled(envelope(*actions), 100, 7.0)))
    assert hints is not None
    return hints


def test_both_dialects_of_retain_and_the_releases_are_read() -> None:
    ranges = [{"end": 50, "priority": 80, "duration": 60}, {"covers_output": True, "priority": 3}]
    dynamo = {
        "priority": 300, "ttl_seconds": 2.5, "execute_at": "request_completion", "include_current_request": True,
        "block_hashes": ["11", "12"],
    }  # fmt: skip
    evict = {"execute_at": "request_completion", "include_current_request": True, "block_hashes": []}
    found = read(("kv.retain", "1.0", {"scope": None, "directives": ranges}), ("kv.retain", "1.0", dynamo))
    assert found == Hints(now=7, spans=[(0, 50, 80, 60.0), (100, None, 3, None), (0, None, 100, 2.5)])
    assert read(("kv.evict", "1.0", evict)) == Hints(now=7, ends=True)
    assert read(("kv.deref", "0.1", {})) == Hints(now=7, ends=True)


def test_what_is_not_executed_is_counted_and_passes_on() -> None:
    elsewhere = {"execute_at": "request_completion", "block_hashes": ["1"]}
    actions = [
        ("kv.fetch", "1.0", {"mode": "x"}), ("kv.demote", "1.0", {}), ("kv.prefetch", "1.0", {}), ("kv.pin", "1.0", {}),
        ("kv.retain", "2.0", {"anything": 1}), ("kv.evict", "1.0", elsewhere),
        ("kv.retain", "1.0", {"priority": 1, **elsewhere}),
    ]  # fmt: skip
    assert read(*actions) == Hints(now=7, ignored=7)
    kinds = [action.action_type for action in compiled(envelope(*actions), 100, 7.0).actions]
    assert kinds == [OURS, "kv.fetch", "kv.demote", "kv.prefetch", "kv.pin"]
    assert compiled(envelope(*actions), 100, 7.0).message_id == "m"


def test_a_client_cannot_write_what_the_scheduler_reads() -> None:
    forged = {"now": 1e300, "spans": [[0, None, 100, None]], "ends": True}
    assert read((OURS, "1.0", forged)) == Hints(now=7, ignored=1)


BAD = [
    {"directives": None}, {"directives": [{}]}, {"directives": [{"priority": 101}]}, {"directives": [{"priority": -1}]},
    {"directives": [{"priority": True}]}, {"directives": [{"priority": 1, "start": -1}]},
    {"directives": [{"priority": 1, "start": 5, "end": 5}]}, {"directives": [{"priority": 1, "end": 1 << 40}]},
    {"directives": [{"priority": 1, "duration": float("nan")}]}, {"directives": [{"priority": 1, "duration": 1e30}]},
    {"directives": [{"priority": 1, "colour": "red"}]}, {"directives": [{"priority": 1}] * 129},
    {"directives": [{"priority": 1, "covers_output": True, "end": 4}]}, {"directives": [], "scope": "x" * 300},
    {"directives": [{"priority": 1}, {"start": 5, "priority": 2}]}, {"execute_at": "now"},
    {"include_current_request": "yes"}, {"include_current_request": True, "priority": 1.5},
    {"include_current_request": True, "priority": 1, "ttl_seconds": 0},
    {"include_current_request": True, "priority": 1, "ttl_seconds": float("inf")},
    {"include_current_request": True, "priority": 1, "ttl_seconds": True},
    {"directives": [{"priority": 1, "duration": True}]}, {"directives": [{"priority": 1, "duration": "60"}]},
]  # fmt: skip


@pytest.mark.parametrize("payload", BAD, ids=map(str, range(len(BAD))))
def test_an_unusable_payload_is_refused_by_a_short_message(payload: Any) -> None:
    with pytest.raises(ValueError, match=r"^kv_hints: kv\.retain: ") as refused:
        compiled(envelope(("kv.retain", "1.0", payload)), 100, 7.0)
    assert len(str(refused.value)) <= 500


def test_the_number_of_actions_is_bounded() -> None:
    with pytest.raises(ValueError, match="at most 16 actions"):
        compiled(envelope(*[("kv.deref", "1.0", {})] * (MAX_ACTIONS + 1)), 100, 7.0)
    many = {"directives": [{"priority": 1}] * 100}
    with pytest.raises(ValueError, match="at most 128 ranges"):
        compiled(envelope(("kv.retain", "1.0", many), ("kv.retain", "1.0", many)), 100, 7.0)


def test_of_many_ranges_the_first_are_executed_and_the_others_counted() -> None:
    found = read(("kv.retain", "1.0", {"directives": [{"end": 1 + end, "priority": 9} for end in range(20)]}))
    assert ([span[1] for span in found.spans], found.ignored) == ([1, 2, 3, 4, 5, 6, 7, 8], 12)


def test_random_payloads_are_read_or_refused() -> None:
    dice = random.Random(3)
    values = [None, True, -1, 0, 1, 1 << 70, 0.5, float("inf"), "", "x", [], {}, [{"priority": 1}], {"priority": 1}]
    names = ["directives", "priority", "ttl_seconds", "execute_at", "include_current_request", "block_hashes", "scope"]
    refused = 0
    for _ in range(2000):
        payload = {name: dice.choice(values) for name in dice.sample(names, dice.randint(0, 5))}
        kind, version = dice.choice(["kv.retain", "kv.evict", "kv.deref"]), dice.choice(["1.0", "1", "", "9"])
        try:
            read((kind, version, payload))
        except ValueError:
            refused += 1
    assert 100 < refused < 1900


def test_requests_carry_the_time_once_a_hint_was_seen_and_nothing_before() -> None:
    compiler = HintCompiler()

    def made(hints: Any) -> Any:
        result = SimpleNamespace(kv_hints=hints, input_ids=[1, 2])
        compiler.after_create(result, None, None)
        return result.kv_hints

    assert made(None) is None
    assert hints_of(SimpleNamespace(kv_hints=made(envelope(("kv.deref", "1.0", {}))))).ends  # type: ignore[union-attr]
    stamp = hints_of(SimpleNamespace(kv_hints=made(None)))
    assert stamp is not None
    assert stamp.now > 0
    compiler.after_create(SimpleNamespace(input_ids=[1]), None, None)  # an embedding has no hints


@pytest.mark.parametrize("forged", [{"now": float("inf")}, {"now": -1.0}, {"now": 1.0, "ignored": -1}])
def test_a_scheduler_takes_no_unbounded_numbers(forged: Any) -> None:
    """Of a process that has no hook of ours."""
    action = SimpleNamespace(action_type=OURS, payload=forged)
    with pytest.raises(ValueError, match="Hints"):
        hints_of(SimpleNamespace(kv_hints=SimpleNamespace(actions=[action])))


@pytest.mark.parametrize(("tiers", "kinds"), [(False, [OURS]), (True, ["kv.deref"])])
def test_where_hints_are_not_read_they_reach_storage_backends_as_they_came(tiers: bool, kinds: list[str]) -> None:
    compiler = HintCompiler(partial(why_not_read, "hints"))
    manager = SimpleNamespace(server_args=SimpleNamespace(enable_hierarchical_cache=tiers))
    result = SimpleNamespace(kv_hints=envelope(("kv.deref", "1.0", {})), input_ids=[1])
    compiler.after_create(result, manager, None)
    assert [action.action_type for action in result.kv_hints.actions] == kinds
