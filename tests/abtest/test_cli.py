"""`python -m sgl_prefix_attn abtest`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main

RESULTS = str(Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_attention.json")


def test_steps_has_a_row_for_each_policy_and_family(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["packed", "conservative", "shipped@5"]
    assert main(["abtest", "steps", RESULTS, *policies, "--stock", "fa3", "--families"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    families = ["pat", "fasttree", "random", "rl", "agents", "chat", "none"]
    assert [row[0] for row in rows] == [name for policy in policies for name in (policy, *families)]
    steps, packed = rows[0][1:3]
    assert steps == packed
