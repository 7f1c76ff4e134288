"""The replays of benchmarks/cache: the limits are limits, and the real cache does what the block replay says."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.cache import __main__ as command
from benchmarks.cache import blocks, trace
from benchmarks.cache.trace import Prompt

POOL = 60


def conversations(requests: int, seed: int = 1) -> list[Prompt]:
    """Conversations that go on after 15 to 30 other requests, among prompts that nobody asks again."""
    dice = random.Random(seed)
    number = 1
    due: dict[int, tuple[int, ...]] = {}
    prompts = []
    for now in range(requests):
        before = due.pop(now, (0,))
        goes_on = len(before) > 1 or dice.random() < 0.1
        new = dice.randint(1, 6)
        asked = (*before, *range(number, number + new))
        number += new
        prompts.append(Prompt(asked, len(asked) - 1))
        if goes_on and len(asked) < 30:
            due[now + dice.randint(15, 30)] = asked[:-1]
    return prompts


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return conversations(1500)


def test_more_knowledge_saves_more(prompts: list[Prompt]) -> None:
    saved = [blocks.limit(prompts, POOL, k) for k in (0, 4, 16, 64, blocks.NEVER)]
    assert saved == sorted(saved)
    assert saved[0] < saved[-1] <= trace.unbounded(prompts)


def test_lru_against_a_plain_one(prompts: list[Prompt]) -> None:
    order: list[int] = []  # least recently used first; of one prompt the deepest first
    saved = total = 0
    for prompt in prompts:
        total += len(prompt.blocks)
        for block in prompt.blocks:
            if block not in order:
                break
            saved += 1
        order = [block for block in order if block not in prompt.blocks] + list(reversed(prompt.blocks))
        order = order[-POOL:]
    assert blocks.limit(prompts, POOL, 0) == saved / total


@pytest.mark.parametrize("lookahead", [8, 64])
def test_ours_with_a_queue_saves_what_the_limit_does(prompts: list[Prompt], lookahead: int) -> None:
    assert blocks.ours(prompts, POOL, lookahead) >= 0.95 * blocks.limit(prompts, POOL, lookahead)


def test_ours_without_a_queue_closes_part_of_the_gap(prompts: list[Prompt]) -> None:
    lru, optimum = blocks.limit(prompts, POOL, 0), blocks.limit(prompts, POOL, blocks.NEVER)
    assert blocks.ours(prompts, POOL, 0) > lru + 0.25 * (optimum - lru)


@pytest.mark.parametrize("lookahead", [0, 16])
@pytest.mark.parametrize("kind", ["RadixCache", "UnifiedRadixCache"])
def test_a_real_cache_takes_the_same_decisions(
    prompts: list[Prompt], kind: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    if hasattr(UnifiedRadixCache, "lock"):
        pytest.skip("the replay speaks to the caches of SGLang up to 0.5.22")
    from benchmarks.cache import real
    from sgl_prefix_attn.sglang_plugin.pinning import eviction_policy

    monkeypatch.setattr(eviction_policy, "_QUANTA", 1 << 30)  # evict exactly what is asked for
    done = real.replay(prompts, POOL, kind, "lru", retention=True, lookahead=lookahead)
    expected = blocks.ours(prompts, POOL, lookahead)
    # With a queue nodes can be split later than blocks are told apart, which may cost a few.
    assert done.saved == pytest.approx(expected, rel=0 if lookahead == 0 else 0.02)


def test_the_command_writes_results_and_adds_to_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "trace.jsonl", tmp_path / "cache.json"
    lines = [
        json.dumps({"hash_ids": list(prompt.blocks), "input_length": prompt.full * trace.BLOCK_TOKENS + 7})
        for prompt in conversations(60)
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = [str(file), "--pools", "30,60", "--out", str(out), "--only", "limits,blocks"]
    assert command.main([*arguments, "--lookahead", "0"]) == 0
    first = json.loads(out.read_text())["rows"]
    assert command.main([*arguments, "--lookahead", "0,4"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows["limit K=0"] == first["limit K=0"]
    assert set(rows) == {"limit K=0", "limit K=all", "limit K=4", "ours K=0", "ours K=4"}
    assert out.with_suffix(".png").stat().st_size > 0
    assert "ours K=4" in capsys.readouterr().out


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1], "input_length": 5}\n{"input_length": 5}\n', encoding="utf-8")
    assert command.main([str(file)]) == 2
    assert f"{file}:2" in capsys.readouterr().err
