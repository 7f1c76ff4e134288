"""Drawn steps with several query rows a request: what they are, and that each can be planned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernel import mixed_prediction, mixed_steps


def test_verify_steps_are_the_drawn_ones_with_drafts() -> None:
    for step in mixed_steps.draw_verify(1, 20, 8):
        assert (step.query_lens == 8).all()
        assert (step.case.lengths >= step.case.tail_begin + 8).all()
        assert len(step.query_lens) == len(step.case.paths)


@pytest.mark.parametrize("options", [[], ["--verify", "4"]], ids=["mixed", "verify"])
def test_a_dry_run_predicts_each_case(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert mixed_steps.main(["--list", "--cases", "6", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows
    assert all(row["predicted_us"] > 0.8 * row["limit_us"] for row in rows)
    assert len({row["key"] for row in rows}) == len(rows)
    assert all(np.isfinite(row["limit_us"]) and row["kv_tokens_packed"] >= row["kv_tokens_unique"] for row in rows)


def test_a_run_goes_on_with_the_seed_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mixed.json"
    out.write_text(json.dumps({"seed": 77, "verify": None, "rows": []}))
    resumed = ["--list", "--cases", "3", "--resume", "--out", str(out)]
    assert mixed_steps.main(resumed) == 0
    assert [json.loads(line)["case"].split("/")[1] for line in capsys.readouterr().out.splitlines()] == [
        "77-0", "77-1", "77-2"
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        mixed_steps.main([*resumed, "--verify", "4"])


def test_the_model_of_fa3_meets_measured_decode_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn batches whose seed was not fitted. Tiles and arithmetic of prefill rows are assumptions."""
    path = Path(__file__).parents[3] / "benchmarks/results/gpu_drawn.json"
    assert mixed_prediction.main(["--check", str(path)]) == 0
    found = re.fullmatch(r"214 decode steps: median error ([0-9.]+)%.*\n", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) < 7
