"""`python -m sgl_prefix_attn abtest`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main

RESULTS = str(Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_attention.json")


def test_steps_prints_a_row_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["abtest", "steps", RESULTS, "packed", "stock", "conservative", "shipped@5", "--stock", "fa3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["policy", "steps", "packed", "wrong", "regret", "mean", "worst", "worst", "against",
                                "stock", "gain", "behind"]  # fmt: skip
    assert [line.split()[0] for line in lines[2:6]] == ["packed", "stock", "conservative", "shipped@5"]
    steps, packed = lines[2].split()[1:3]
    assert steps == packed


def test_steps_by_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["abtest", "steps", RESULTS, "shipped", "--families"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert names == ["shipped", "pat", "fasttree", "random", "rl", "agents", "chat", "none"]


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
