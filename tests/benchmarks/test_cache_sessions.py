"""Sessions of a trace, and the replay with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from benchmarks.cache import sessions
from benchmarks.cache.trace import Prompt, turns_of, working_set


def prompt(*blocks: int) -> Prompt:
    return Prompt(blocks, len(blocks))


def test_a_turn_continues_the_latest_prompt_that_is_its_beginning() -> None:
    prompts = [
        prompt(0, 1, 2),
        prompt(0, 5),
        prompt(0, 1, 2, 3),
        prompt(0, 9, 9),
        prompt(0, 1, 2, 3, 4),
        prompt(0, 5, 6),
    ]
    turns = turns_of(prompts)
    assert [turn.session for turn in turns] == [0, 1, 0, 3, 0, 1]
    assert [turn.last for turn in turns] == [False, False, False, True, True, True]
    assert working_set(prompts[:1], turns_of(prompts[:1])) == 3
    assert working_set(prompts, turns) == pytest.approx((3 + 4 + 5 + 6 + 6 + 3) / 6)


def test_the_command_writes_what_it_computed(tmp_path: Path) -> None:
    lines = []
    for turn in range(1, 9):
        for agent in range(6):
            blocks = [0, *range(100 * agent + 100, 100 * agent + 100 + 3 * turn)]
            lines.append(json.dumps({"hash_ids": blocks, "input_length": 512 * len(blocks)}))
            lines.append(
                json.dumps(
                    {"hash_ids": [0, *range(9000 + 10 * len(lines), 9009 + 10 * len(lines))], "input_length": 5120}
                )
            )
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text("\n".join(lines))
    assert sessions.main([str(trace), "--out", str(out), "--requests", "96", "--slices", "1", "--part", "1.1"]) == 0
    (found,) = json.loads(out.read_text())["slices"]
    assert found["computed_against_lru"]["hints"] < 0.9  # prompts that nobody continues go at once
