"""Servers that refuse packing: their steps are SGLang's own, by every instruction, and they hold the same memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.demo.server import ServerOptions, log_tail
from tests.support import forked_server, refused


@pytest.mark.e2e
@pytest.mark.parametrize("name", refused.CONFIGURATIONS)
def test_a_step_runs_nothing_else_than_without_the_package(name: str, tmp_path: Path) -> None:
    """The process itself fails if a backend of ours is there, or if wrap mode was not."""
    found = {}
    for kind in ("compared", "alone", "refused"):
        out, log = tmp_path / f"{kind}.json", tmp_path / kind
        command = [sys.executable, "-m", "tests.support.refused", name, kind, str(out)]
        with log.open("wb") as output:
            forked_server.start(command, {**ServerOptions("", None).full_environment()}, output).wait(300)
        assert out.exists(), log_tail(log)
        found[kind] = json.loads(out.read_text())
    compared = found["compared"]
    assert compared["same"], compared
    assert min(compared["seen"]) > 500
    assert compared["calls_of_ours"] == 0
    assert compared["changed"] == ["sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"]
    assert compared["bytes"]["loading"] == 0
    assert compared["bytes"]["refused"] == compared["bytes"]["absent"]
    assert found["refused"] == found["alone"]
    assert found["alone"]["bytes"] > 2**20


def test_what_is_counted_shows_one_instruction_and_one_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (refused.instructions(lambda most=most: [0 for n in range(3) if n < most]) for most in (2, 3))
    assert 0 < len(one) != len(other)
    before = refused.attributes()
    assert refused.changed(before) == []
    forward = RadixAttention.forward
    monkeypatch.setattr(RadixAttention, "forward", lambda *arguments, **named: forward(*arguments, **named))
    assert refused.changed(before) == ["sglang.srt.layers.radix_attention.RadixAttention.forward"]
