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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([RESULTS, "batch>=many"], "'batch>=many': the N of batch>=N has to be a whole number"),
        ([RESULTS, "shipped@much"], "'shipped@much': expected auto, cost"),
        ([RESULTS, "nowhere.json"], "nowhere.json: cannot read the profile"),
        (["nowhere.json", "packed"], "nowhere.json: cannot read the results"),
        ([RESULTS, "shipped", "--packed", "cpu"], "no cost of packed kernels 'cpu'; it has triton, native"),
        ([RESULTS, "packed", "--packed", "cpu"], "no measured step has both times"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["abtest", "steps", *arguments]) == 2
    assert message in capsys.readouterr().err
