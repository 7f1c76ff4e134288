"""The GPU benchmark without a GPU: its dense attention, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel.gpu_case_run import CaseRun
from benchmarks.kernel.gpu_report import OURS, Results
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

    def measure(self, plan: Any, run: Any) -> Times:
        return Times(run.__self__.option, 1.0, 2.0, 20, 0.0)

    def quick(self, run: Any) -> float:
        return run.__self__.option

    def plan_and_launch(self, plan: Any, run: Any) -> float:
        return 3.0


class DenseBaseline(Baseline):
    """Right, and takes `us`."""

    def __init__(self, name: str, us: float) -> None:
        self.name, self.us = name, us

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        return [self.us]

    def use(self, option: float) -> None:
        self.option = option

    def plan(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def run(self) -> torch.Tensor:
        dense = [self.fixture.dense(request) for request in range(len(self.fixture.case.paths))]
        self.fixture.out.copy_(torch.stack(dense))
        return self.fixture.out


@pytest.fixture
def case() -> Case:
    return make_case("random/small", (8, 2), *random_forest(0, 12, 3, 20, 10))


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


def test_routing_reads_what_is_written(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    header = {"machine": {"gpu": "H200", "date": "today"}, "commit": "abc", "kv_dtype": "fp8_e4m3"}
    pool = KvPool(pool_elements([case]), CPU, torch.float8_e4m3fn)
    baselines = [DenseBaseline(OURS, 5.0), DenseBaseline("fa3", 7.0)]
    Results(path, header).add(CaseRun(case, baselines, pool, FakeTimer(), 4e12).row())  # type: ignore[arg-type, list-item]
    (measured,) = read_results(path).cases
    assert (measured.packed, measured.stock) == ({"native": 5.0}, {"fa3": 7.0})
    assert measured.shape == ModelShape(8, 2, 128, kv_bytes=1)
    assert (measured.step.requests, measured.step.tokens) == (len(case.seq_lens), sum(case.seq_lens))
    assert measured.step.unique_tokens == case.unique_tokens
