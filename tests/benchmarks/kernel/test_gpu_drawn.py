"""The benchmark of drawn batches without a GPU: seeds, resuming, what serves a case, summaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernel.gpu_drawn import parser, run_cases, seed_of
from benchmarks.kernel.gpu_drawn_report import drawn_lines, drawn_summary
from benchmarks.kernel.gpu_report import OURS, Results
from sgl_prefix_attn.workloads import Case, make_case
from tests.benchmarks.kernel.test_gpu_run import DenseBaseline, FakeTimer


def args_of(*arguments: str) -> Any:
    return parser().parse_args(list(arguments))


def small(name: str, head_dim: int = 128, kv_dtype: str = "bf16") -> Case:
    paths = [[(0, 0, 6)], [(0, 0, 6)], []]
    return make_case(name, (8, 2), paths, [9, 8, 5], head_dim=head_dim, kv_dtype=kv_dtype, detail="three requests")


def test_acceptance_draws_a_seed_and_keeps_its_file(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    new = args_of("--set", "acceptance", "--out", str(out))
    assert seed_of(new) != seed_of(new)
    out.write_text(json.dumps({"set": "acceptance", "seed": 77}))
    with pytest.raises(ValueError, match="acceptance runs are kept"):
        seed_of(new)
    with pytest.raises(ValueError, match="acceptance runs are kept"):
        seed_of(args_of("--set", "dev", "--out", str(out)))
    assert seed_of(args_of("--set", "acceptance", "--out", str(out), "--resume")) == 77
    with pytest.raises(ValueError, match="draws its own seed"):
        seed_of(args_of("--set", "acceptance", "--seed", "3"))


def test_cases_of_all_types_and_sizes_share_a_run_that_is_resumed(tmp_path: Path) -> None:
    cases = [small("a/0"), small("b/1", head_dim=64), small("b/2", kv_dtype="fp8_e4m3"), small("b/3", head_dim=256)]
    baselines = [DenseBaseline(OURS, [10.0]), DenseBaseline("fa3", [9.0])]
    header = {"machine": {"copy_bandwidth": 4e12}, "set": "dev", "seed": 1}
    args = args_of("--seconds", "100")
    out = tmp_path / "run.json"
    results = Results(out, header, summarise=drawn_summary)
    assert run_cases(cases[:2], baselines, results, FakeTimer(), args) == 0  # type: ignore[arg-type]
    results = Results(out, header, resume=True, summarise=drawn_summary)
    left = [case for case in cases if not results.done(case.key)]
    assert left == cases[2:]
    assert run_cases(left, baselines, results, FakeTimer(), args) == 0  # type: ignore[arg-type]
    written = json.loads(out.read_text())
    assert [row["key"] for row in written["rows"]] == [case.key for case in cases]
    assert [row["head_dim"] for row in written["rows"]] == [128, 64, 128, 256]
    assert all("failed" not in result for row in written["rows"] for result in row["ways"].values())
    assert written["summary"]["bf16"]["cases"] == 3
    assert written["summary"]["fp8"]["cases"] == 1
    assert written["rows"][0]["detail"] == "three requests"


def row_of(key: str, heads: str, ours: float | None, best: float, kv_dtype: str = "bf16") -> dict[str, Any]:
    mine = {"failed": "wrong"} if ours is None else {"cold_us": ours, "predicted_us": 1.25 * ours}
    return {
        "key": key, "case": key, "heads": heads, "head_dim": 128, "kv_dtype": kv_dtype, "reuse": 2.0,
        "limits": {"limit_us": 8.0}, "ways": {OURS: mine, "fa3": {"cold_us": best}},
    }  # fmt: skip


def test_summary_counts_behind_and_prediction_error() -> None:
    rows = [
        row_of("rollouts/1", "32/8", 20.0, 40.0),
        row_of("rollouts/2", "8/1", 40.0, 20.0),
        row_of("agents/3", "8/1", 20.0, 19.4),
        row_of("agents/4", "8/1", None, 20.0),
        row_of("agents/5", "8/1", 10.0, 20.0, "fp8_e4m3"),
    ]
    summary = drawn_summary(rows)
    assert summary["bf16"]["cases"] == 4
    assert summary["bf16"]["compared"] == 3
    assert (summary["bf16"]["behind_2_percent"], summary["bf16"]["behind_10_percent"]) == (2, 1)
    assert summary["bf16"]["worst"] == (0.5, "rollouts/2")
    assert summary["bf16"]["prediction_error"] == pytest.approx(0.25)
    assert summary["bf16_by_family"]["rollouts"]["of_floor"] == pytest.approx((1.0 * 0.5) ** 0.5)
    assert summary["bf16_by_heads"]["32/8"]["over_best_baseline"] == pytest.approx(2.0)
    assert summary["fp8"]["cases"] == 1
    assert summary["failed"] == ["agents/4: wrong"]
    assert any(line.split()[:2] == ["rollouts", "2"] for line in drawn_lines(rows))
