"""The GPU benchmark without a GPU: what is checked, recorded, resumed, printed and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel.gpu_case_run import CaseRun
from benchmarks.kernel.gpu_report import OURS, Results, best_of, fraction_of_limit, ratio
from sgl_prefix_attn.calibration.kernels.baseline import Baseline
from sgl_prefix_attn.calibration.kernels.fixture import KV_DTYPES, Fixture, KvPool, pool_elements
from sgl_prefix_attn.calibration.kernels.timing import Times
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.measured import read_results
from sgl_prefix_attn.testing.reference import reference_attention
from sgl_prefix_attn.workloads.case import Case, make_case
from sgl_prefix_attn.workloads.committed import random_forest

CPU = torch.device("cpu")


class FakeTimer:
    """Says that a baseline takes as long as its option."""

    device = CPU

    def __init__(self) -> None:
        self.lost = False

    def measure(self, plan: Any, run: Any) -> Times:
        return Times(run.__self__.option, 1.0, 2.0, 20, 0.0)

    def quick(self, run: Any) -> float:
        return run.__self__.option

    def plan_and_launch(self, plan: Any, run: Any) -> float:
        return 3.0

    def device_is_lost(self) -> bool:
        return self.lost


class DenseBaseline(Baseline):
    """Right but for `off`; the options in `broken` raise."""

    def __init__(self, name: str, options: list[float], off: float = 0.0, broken: tuple[float, ...] = ()) -> None:
        self.name, self.options, self.off, self.broken = name, options, off, broken

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        return self.options

    def use(self, option: float) -> None:
        self.option = option

    def plan(self) -> None:
        if self.option in self.broken:
            raise NotImplementedError(f"no kernel for {self.option}")

    def prepare(self) -> None:
        pass

    def run(self) -> torch.Tensor:
        dense = [self.fixture.dense(request) for request in range(len(self.fixture.case.paths))]
        self.fixture.out.copy_(torch.stack(dense) + self.off)
        return self.fixture.out


@pytest.fixture
def case() -> Case:
    return make_case("random/small", (8, 2), *random_forest(0, 12, 3, 20, 10))


def run_case(case: Case, *baselines: Baseline, kv_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    torch.manual_seed(0)
    pool = KvPool(pool_elements([case]), CPU, kv_dtype)
    return CaseRun(case, list(baselines), pool, FakeTimer(), 4e12).row()  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values())
def test_dense_attention_of_the_fixture_is_the_reference(case: Case, kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fixture = Fixture(case, KvPool(pool_elements([case]), CPU, kv_dtype), CPU)
    assert fixture.kv_dtype is kv_dtype
    expected, _ = reference_attention(
        fixture.q, fixture.k, fixture.v, req_to_token=fixture.table, req_pool_indices=fixture.rows,
        seq_lens=fixture.lens64, query_lens=torch.ones_like(fixture.lens64), scale=fixture.scale,
    )  # fmt: skip
    found = torch.stack([fixture.dense(request, block=7) for request in range(len(case.paths))])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert fixture.kv_indices.tolist() == [
        slot for row, length in zip(fixture.table.tolist(), case.seq_lens, strict=True) for slot in row[:length]
    ]


def test_wrong_and_failing_baselines_are_recorded_and_do_not_end_the_case(case: Case) -> None:
    row = run_case(
        case, DenseBaseline(OURS, [5.0]), DenseBaseline("fa3", [1.0], off=0.1),
        DenseBaseline("triton", [1.0], broken=(1.0,)), DenseBaseline("flashinfer_decode_cc", [8.0]),
        DenseBaseline("flashinfer_cascade", []),
    )  # fmt: skip
    assert "wrong result" in row["baselines"]["fa3"]["failed"]
    assert row["baselines"]["triton"]["failed"] == "NotImplementedError: no kernel for 1.0"
    assert "flashinfer_cascade" not in row["baselines"]
    assert best_of(row) == ("flashinfer_decode_cc", 8.0)
    assert ratio(row) == 8.0 / 5.0
    assert fraction_of_limit(row) == row["limits"]["limit_us"] / 5.0


def test_routing_reads_what_is_written(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    header = {"machine": {"gpu": "H200", "date": "today"}, "commit": "abc", "kv_dtype": "fp8_e4m3"}
    Results(path, header).add(
        run_case(case, DenseBaseline(OURS, [5.0]), DenseBaseline("fa3", [7.0]), kv_dtype=torch.float8_e4m3fn)
    )
    (measured,) = read_results(path).cases
    assert (measured.packed, measured.stock) == ({"native": 5.0}, {"fa3": 7.0})
    assert measured.shape == ModelShape(8, 2, 128, kv_bytes=1)
    assert (measured.step.requests, measured.step.tokens) == (len(case.seq_lens), sum(case.seq_lens))
    assert measured.step.unique_tokens == case.unique_tokens
