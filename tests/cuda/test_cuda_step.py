"""What a `CudaStep` refuses before anything is launched; the launches themselves are recorded, not made."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import cuda_step
from sgl_prefix_attn.core.cuda_step import CudaStep
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import TILE_ROWS, DeviceModel, ModelShape, Plan, Planner
from sgl_prefix_attn.core.step_buffers import PlanTooLarge, StepLimits
from sgl_prefix_attn.core.step_pool import limits_of

LIMITS = StepLimits(queries=256, items=512, kv_slots=1 << 16, partials=1024)
FEW = 2  # num_sms, so few that the widest tiles leave none idle


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the CUDA half of the native module; the names of what would have been launched."""
    made: list[str] = []
    kept = (
        "serialize_plan", "head_halves", "item_record_words", "item_prologue_words", "combine_room", "tile_counters",
        "AttentionParams",
    )  # fmt: skip
    native: dict[str, Any] = {name: getattr(_native, name) for name in kept}
    monkeypatch.setattr(cuda_step, "_native", SimpleNamespace(
        built_with_cuda=True, StepAddresses=dict,
        cuda_launch_size=lambda **_: SimpleNamespace(ctas=4, few_ctas=2, warp_ctas=4, cta_warps=7, overlap=True),
        cuda_prepare=lambda *_, **__: made.append("prepare"), cuda_attend=lambda *_, **__: made.append("attend"),
        **native,
    ))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    return made


def shared_by(requests: int, head_dim: int, device: DeviceModel) -> tuple[Plan, np.ndarray]:
    lens = np.full(requests, 900)
    forest = PrefixForest.from_paths([[(0, 0, 800)]] * requests)
    return Planner(ModelShape(8, 2, head_dim), device).plan(forest, lens), lens


def step_of(head_dim: int) -> CudaStep:
    return CudaStep(ModelShape(8, 2, head_dim), torch.bfloat16, torch.device("cpu"), LIMITS)


@pytest.mark.parametrize(("head_dim", "widest"), [(64, 128), (128, 128), (256, 64)])
def test_the_device_model_has_the_tiles_of_the_kernels(launches: list[str], head_dim: int, widest: int) -> None:
    device = replace(DeviceModel.gpu(FEW, head_dim=head_dim), item_overhead=0.0)
    plan, lens = shared_by(60, head_dim, device)
    assert plan.items[:, TILE_ROWS].max() == widest
    step_of(head_dim).load(plan, lens, 0)


def test_a_tile_that_the_kernels_do_not_have_is_refused(launches: list[str]) -> None:
    plan, lens = shared_by(60, 256, replace(DeviceModel.gpu(FEW), item_overhead=0.0))
    with pytest.raises(PlanTooLarge, match="tiles of 128 rows; with head_dim 256 the GPU kernels have at most 64"):
        step_of(256).load(plan, lens, 0)


def test_more_partial_results_than_can_be_combined_are_refused(launches, monkeypatch):
    plan, lens = shared_by(60, 128, DeviceModel.gpu(FEW))
    most = np.diff(plan.combine_offset).max()
    monkeypatch.setattr(cuda_step._native, "combine_room", int(most))
    step_of(128).load(plan, lens, 0)
    monkeypatch.setattr(cuda_step._native, "combine_room", int(most) - 1)
    with pytest.raises(PlanTooLarge, match=f"{most} partial results of one query; .* at most {most - 1}"):
        step_of(128).load(plan, lens, 0)


def test_a_plan_of_any_size_within_the_limits_fits_the_buffers(launches, monkeypatch):
    plan, lens = shared_by(60, 128, replace(DeviceModel.gpu(132), item_overhead=0.0))
    exact = StepLimits(
        plan.num_queries,
        len(plan.items),
        _native.serialize_plan(plan, lens, growth=0, group=4).kv_slots,
        plan.num_partials,
    )
    step = CudaStep(ModelShape(8, 2, 128), torch.bfloat16, torch.device("cpu"), exact)
    step.load(plan, lens, 0)
    words = _native.serialize_plan(plan, lens, growth=0, group=4, cta_warps=7).words
    np.testing.assert_array_equal(step._words[: len(words)].numpy(), words)
    monkeypatch.setattr(StepLimits, "combine_lists", 59)
    with pytest.raises(PlanTooLarge, match="the plan needs 60 combine_lists; the buffers hold 59"):
        step.load(plan, lens, 0)
    with pytest.raises(PlanTooLarge, match="items; the buffers hold"):
        CudaStep(step.shape, step.dtype, step.device, replace(exact, items=1)).load(plan, lens, 0)


def test_more_kv_slots_than_a_word_can_count_are_refused(launches: list[str]) -> None:
    lens = np.full(2100, 1 << 20, dtype=np.int64)
    planner = Planner(ModelShape(8, 2, 128), DeviceModel.gpu(132, group=4))
    plan = planner.plan(PrefixForest.from_paths([()] * len(lens)), lens)
    with pytest.raises(PlanTooLarge, match=r"more than 2\^31 - 1 KV slots"):
        step_of(128).load(plan, lens, 0)
    with pytest.raises(PlanTooLarge, match=r"more than 2\^31 - 1 KV slots"):
        limits_of(plan, lens, ModelShape(8, 2, 128))


def test_tables_and_scale_are_checked(launches: list[str]) -> None:
    step = step_of(128)
    table, rows, lens = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.ones(2).long()
    step.prepare(table, rows, lens)
    with pytest.raises(ValueError, match=r"seq_lens must be a contiguous torch\.int64"):
        step.prepare(table, rows, lens.int())
    q, cache = torch.zeros(2, 8, 128, dtype=torch.bfloat16), torch.zeros(16, 2, 128, dtype=torch.bfloat16)
    step.attend(q, cache, cache, q.clone(), scale=0.1)
    with pytest.raises(ValueError, match=r"scale is 0\.0"):
        step.attend(q, cache, cache, q.clone(), scale=0.0)
    assert launches == ["prepare", "attend"]


def test_tables_with_fewer_entries_than_the_plan_are_refused(launches: list[str]) -> None:
    """The device would read whatever lies behind them."""
    plan, lens = shared_by(6, 128, DeviceModel.gpu(FEW))
    step = step_of(128)
    table, rows, long = torch.zeros(6, 900, dtype=torch.int32), torch.zeros(6).long(), torch.from_numpy(lens)
    padded = torch.ones(9).long()  # as a graph pads a batch
    step.load(plan, lens, 0)
    step.prepare(table, rows, long, torch.ones(6).long())
    step.prepare(table, padded, padded, padded)
    for tables, message in (
        ((table, rows[:5], long), "req_pool_indices has 5 entries; the plan needs 6"),
        ((table, rows, long[:5]), "seq_lens has 5 entries; the plan needs 6"),
        ((table, rows, long, torch.ones(5).long()), "visible has 5 entries; the plan needs 6"),
        ((table, rows, long, torch.ones(12).long()[::2]), r"visible must be a contiguous torch\.int64"),
        ((table, rows, long, torch.ones(6)), r"visible must be a contiguous torch\.int64"),
        ((table.flatten(), rows, long), "req_to_token must be a contiguous .* of 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            step.prepare(*tables)
    assert launches == ["prepare", "prepare"]


def test_what_belongs_to_heads_is_checked(launches: list[str]) -> None:
    """It is read and written as float32, heads one behind the other."""
    step = step_of(128)
    q, cache = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(16, 2, 128, dtype=torch.bfloat16)
    step.attend(q, cache, cache, q.clone(), scale=0.1, lse=torch.zeros(3, 9)[:, :8], sinks=torch.zeros(8))
    for options in (
        {"sinks": torch.zeros(8, dtype=torch.bfloat16)},
        {"sinks": torch.zeros(2)},
        {"sinks": torch.zeros(16)[::2]},
        {"lse": torch.zeros(2, 8)},
        {"lse": torch.zeros(8, 3).T},
        {"lse": torch.zeros(3, 8, dtype=torch.float64)},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; expected float32"):
            step.attend(q, cache, cache, q.clone(), scale=0.1, **options)
    assert launches == ["attend"]
