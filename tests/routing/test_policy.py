"""The decision: predicted times, the margin, and what steps that run packed already are granted."""

from __future__ import annotations

import dataclasses
import json
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.cost import TERMS, KernelCost
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.policy import CostPolicy, Route, Router, cost_policy, policy_of
from sgl_prefix_attn.routing.policy_names import parse
from sgl_prefix_attn.routing.profile import ProfileError, load_profile, shipped_profile, shipped_profile_of
from tests.routing.profiles import profile

LLAMA_8B = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
STEP = StepFeatures(8, 8000, 8000, 0, 0, 0, 1000, 1000)


class TestShippedProfile:
    """On an H200 with Llama-3-8B's heads."""

    @pytest.mark.parametrize(
        ("kernels", "backend", "kv_bytes", "measured_with"),
        [("native", "fa3", 2, 2), ("native", "flashinfer_tc", 1, 1), ("triton", "flashinfer_cc", 1, 1),
         ("native", "fa3", 1, 2), ("native", "triton_gqa", 1, 2), ("cpu", "torch_native", 4, 2)],
    )  # fmt: skip
    def test_the_one_for_the_bytes_of_kv_is_taken_if_it_knows_the_kernels(
        self, kernels: str, backend: str, kv_bytes: int, measured_with: int
    ) -> None:
        assert shipped_profile_of(kernels, backend, kv_bytes).kv_bytes == measured_with


class TestRouter:
    def test_remembers_the_last_route(self) -> None:
        costs = KernelCost("packed", {"launch": 95.0}), KernelCost("stock", {"longest_request": 100.0})
        router = Router(CostPolicy(*costs, LLAMA_8B, 0.1))
        forest = PrefixForest.from_paths([[]])
        lengths = [1000, 1050, 1000, 940, 1000]
        taken = [router.decide(forest, np.array([length], dtype=np.int64)) for length in lengths]
        packed, stock = Route.PACKED, Route.STOCK
        assert taken == [stock, packed, packed, stock, stock], "the same length goes where the step before went"

    def test_a_decision_is_cheap(self) -> None:
        """Measured: see docs/routing.md. The bound leaves room for busy machines."""
        shipped = shipped_profile()
        packed, stock = shipped.cost("packed", "native"), shipped.cost("stock", "fa3")
        router = Router(CostPolicy(packed, stock, LLAMA_8B, 0.1))
        forest = PrefixForest.from_paths([[(prompt, 0, 4096)] for prompt in range(64) for _ in range(16)])
        lengths = np.full(1024, 5000, dtype=np.int64)
        best = min(timeit.repeat(lambda: router.decide(forest, lengths), number=20, repeat=20)) / 20
        assert best < 200e-6


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["cost", "conservative", "packed", "batch>=1", "reuse>=1"])
def test_a_step_without_requests_has_a_route(name: str, rows: int) -> None:
    cost = cost_policy(shipped_profile(), "native", "fa3", LLAMA_8B)
    policy = policy_of(parse(name), cost, ConservativePolicy(LLAMA_8B, "native"))
    assert Router(policy).decide(PrefixForest.from_paths([]), np.zeros(0, dtype=np.int64), rows) in Route


class TestKernelCost:
    @pytest.mark.parametrize("kind", ["packed", "stock"])
    @pytest.mark.parametrize("field", ["requests", "tokens", "nodes", "links", "longest_range", "longest_request"])
    def test_more_work_never_takes_less_time(self, kind: str, field: str) -> None:
        cost = KernelCost(kind, dict.fromkeys(TERMS[kind], 1.0))  # type: ignore[index, arg-type]
        more = dataclasses.replace(STEP, **{field: getattr(STEP, field) + 8})
        assert cost.microseconds(more, LLAMA_8B) >= cost.microseconds(STEP, LLAMA_8B)

    def test_an_unknown_term_is_named(self) -> None:
        with pytest.raises(ValueError, match="no term 'lunch' in the cost of packed steps; there are launch, "):
            KernelCost("packed", {"lunch": 1.0})

    @pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
    def test_an_impossible_coefficient_is_named(self, value: float) -> None:
        with pytest.raises(ValueError, match="term 'launch' costs"):
            KernelCost("stock", {"launch": value})


class TestProfileFile:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 2}, "version: Value error, this release reads profiles of version 1"),
            ({"packed": {"native": {"us": {"lunch": 1.0}}}}, "packed: Value error, native: no term 'lunch'"),
            ({"stock": {"fa3": {"us": {"launch": -1.0}}}}, r"stock\.fa3\.us\.launch: Input should be greater"),
            ({"more": 1}, "more: Extra inputs are not permitted"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_place(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        path = tmp_path / "p.json"
        path.write_text(json.dumps(profile({}, {}).model_dump() | change), encoding="utf-8")
        with pytest.raises(ProfileError, match=message):
            load_profile(path)

    @pytest.mark.parametrize("text", ["launch: 3", "[" * 100_000], ids=["text", "deep"])
    def test_something_else_than_json(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "p.json").write_text(text, encoding="utf-8")
        with pytest.raises(ProfileError, match=r"not a routing profile: the file is not JSON"):
            load_profile(tmp_path / "p.json")
