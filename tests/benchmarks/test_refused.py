"""Servers that refuse packing: their steps are SGLang's own, by every instruction, and they hold the same memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import RadixAttention

from benchmarks.serving import counted
from sgl_prefix_attn.demo.server import ServerOptions, log_tail
from tests.support import forked_server

REFUSED = ("mla", "deterministic")


@pytest.mark.e2e
def test_a_step_runs_nothing_else_than_without_the_package(tmp_path: Path) -> None:
    """The benchmark itself fails if a backend of ours is there, or if wrap mode was not."""
    out, log = tmp_path / "out.json", tmp_path / "log"
    sizes = ["--steps", "4", "--builds", "2", "--starts", "1", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.serving.refused", "--only", *REFUSED, *sizes]
    with log.open("wb") as output:
        forked_server.start(command, {**ServerOptions("", None).full_environment()}, output).wait(300)
    found = json.loads(out.read_text())
    for name in REFUSED:
        assert found[name], log_tail(log)
        (start,) = found[name]
        for what in ("calls", "instructions"):
            assert start[what]["same"], start[what]
            assert start[what]["refused"] > 500
        assert start["calls_of_ours"] == 0
        assert start["changed"] == ["sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"]
        assert start["bytes"]["loading"]["allocated"] == 0
        assert start["bytes"]["refused"] == start["bytes"]["absent_again"]
        assert found["fresh"][name]["refused"] == found["fresh"][name]["alone"]
        assert found["fresh"][name]["alone"]["allocated"] > 2**20


def test_what_is_counted_shows_one_instruction_and_one_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (counted.instructions(lambda most=most: [0 for n in range(3) if n < most]) for most in (2, 3))
    assert 0 < len(one) != len(other)
    before = counted.attributes()
    assert counted.changed(before) == []
    forward = RadixAttention.forward
    monkeypatch.setattr(RadixAttention, "forward", lambda *arguments, **named: forward(*arguments, **named))
    assert counted.changed(before) == ["sglang.srt.layers.radix_attention.RadixAttention.forward"]
