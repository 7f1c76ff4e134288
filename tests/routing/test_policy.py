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
from sgl_prefix_attn.routing.cost import TERMS, CostModel
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.policy import CostPolicy, Route, Router
from sgl_prefix_attn.routing.profile import (
    Profile,
    ProfileError,
    load_profile,
    shipped_profile,
    shipped_profile_for,
    shipped_profile_of,
)
from tests.routing.profiles import profile

LLAMA_8B = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
STEP = StepFeatures(8, 8000, 8000, 0, 0, 0, 1000, 1000)


def policy(packed_us: float, margin: float = 0.1) -> CostPolicy:
    """Packed takes `packed_us`, the stock backend 100 us."""
    return CostPolicy(
        CostModel("packed", {"launch": packed_us}), CostModel("stock", {"launch": 100.0}), LLAMA_8B, margin
    )


class TestMargin:
    def test_a_step_runs_packed_if_that_is_faster_by_the_margin(self) -> None:
        assert policy(90.0).decide(STEP).route is Route.PACKED

    def test_slightly_faster_is_not_enough(self) -> None:
        assert policy(95.0).decide(STEP).route is Route.STOCK

    def test_but_it_is_for_steps_that_run_packed_already(self) -> None:
        assert policy(95.0).decide(STEP, before=Route.PACKED).route is Route.PACKED
        assert policy(101.0).decide(STEP, before=Route.PACKED).route is Route.STOCK

    def test_equal_times_are_the_stock_backends(self) -> None:
        assert policy(100.0, margin=0).decide(STEP).route is Route.STOCK
        assert policy(100.0, margin=0).decide(STEP, before=Route.PACKED).route is Route.STOCK

    def test_the_decision_tells_both_times(self) -> None:
        decision = policy(95.0).decide(STEP)
        assert (decision.packed_us, decision.stock_us) == (95.0, 100.0)


class TestShippedProfile:
    """On an H200 with Llama-3-8B's heads."""

    def route(
        self,
        paths: list[list[tuple[int, int, int]]],
        seq_lens: list[int],
        backend: str = "fa3",
        shape: ModelShape = LLAMA_8B,
    ) -> Route:
        shipped = shipped_profile()
        packed, stock = shipped.cost("packed", "native"), shipped.cost("stock", backend)
        assert packed is not None
        assert stock is not None
        return Router(CostPolicy(packed, stock, shape, 0.2)).decide(
            PrefixForest.from_paths(paths), np.array(seq_lens, dtype=np.int64)
        )

    @pytest.mark.parametrize("backend", ["fa3", "flashinfer_tc"])
    @pytest.mark.parametrize("requests", [1, 8])
    def test_few_requests_without_sharing_stay_with_the_stock_backend(self, requests: int, backend: str) -> None:
        assert self.route([[]] * requests, [512] * requests, backend) is Route.STOCK

    @pytest.mark.parametrize("backend", ["fa3", "flashinfer_tc", "triton_gqa"])
    def test_groups_of_samples_run_packed(self, backend: str) -> None:
        paths = [[(prompt, 0, 4096)] for prompt in range(64) for _ in range(16)]
        assert self.route(paths, [4096 + 160] * 1024, backend) is Route.PACKED

    @pytest.mark.parametrize("backend", ["fa3", "flashinfer_tc", "triton_gqa"])
    def test_with_fp8_kv_what_is_clear_stays_clear(self, backend: str) -> None:
        """Where 16-bit KV's profile has to do: half the bytes make both sides cheaper and no step absurd."""
        fp8 = dataclasses.replace(LLAMA_8B, kv_bytes=1)
        samples = [[(prompt, 0, 4096)] for prompt in range(64) for _ in range(16)]
        assert self.route(samples, [4096 + 160] * 1024, backend, fp8) is Route.PACKED
        if backend != "triton_gqa":
            assert self.route([[]] * 8, [512] * 8, backend, fp8) is Route.STOCK
        shipped = shipped_profile()
        step = StepFeatures(64, 64 * 4096, 40 * 4096, 32 * 4096, 8, 32, 4096, 4096)
        for cost in (shipped.cost("packed", "native"), shipped.cost("stock", backend)):
            assert cost is not None
            wide, narrow = cost.parts(step, LLAMA_8B), cost.parts(step, fp8)
            assert {name: narrow[name] / wide[name] for name in wide if narrow[name] != wide[name]} == {
                name: pytest.approx(0.5) for name in wide if name.endswith("_mb") and name != "row_mb" and wide[name]
            }

    @pytest.mark.parametrize(
        ("kernels", "backend", "kv_bytes", "measured_with"),
        [("native", "fa3", 2, 2), ("native", "flashinfer_tc", 1, 1), ("triton", "flashinfer_cc", 1, 1),
         ("native", "fa3", 1, 2), ("native", "triton_gqa", 1, 2), ("cpu", "torch_native", 4, 2)],
    )  # fmt: skip
    def test_the_one_for_the_bytes_of_kv_is_taken_if_it_knows_the_kernels(
        self, kernels: str, backend: str, kv_bytes: int, measured_with: int
    ) -> None:
        assert shipped_profile_of(kernels, backend, kv_bytes).kv_bytes == measured_with

    def test_it_knows_every_kernel_that_a_gpu_server_may_use(self) -> None:
        shipped = shipped_profile()
        assert set(shipped.packed) == {"native", "triton"}
        assert set(shipped.stock) == {"fa3", "flashinfer_tc", "flashinfer_cc", "triton_gqa", "triton_mha"}


class TestRouter:
    def test_remembers_the_last_route(self) -> None:
        router = Router(
            CostPolicy(
                CostModel("packed", {"launch": 95.0}), CostModel("stock", {"longest_request": 100.0}), LLAMA_8B, 0.1
            )
        )
        forest = PrefixForest.from_paths([[]])
        lengths = [1000, 1050, 1000, 940, 1000]
        taken = [router.decide(forest, np.array([length], dtype=np.int64)) for length in lengths]
        packed, stock = Route.PACKED, Route.STOCK
        assert taken == [stock, packed, packed, stock, stock], "the same length goes where the step before went"

    def test_the_same_steps_get_the_same_routes(self) -> None:
        """Tensor-parallel ranks have no other way to agree."""
        shipped = profile({"launch": 20.0, "unique_mb": 0.2}, {"launch": 10.0, "unique_mb": 0.3})
        rng = np.random.default_rng(0)
        steps = [rng.integers(1, 4000, 16) for _ in range(50)]
        forest = PrefixForest.from_paths([[]] * 16)

        def routes() -> list[Route]:
            packed, stock = shipped.cost("packed", "native"), shipped.cost("stock", "fa3")
            assert packed is not None
            assert stock is not None
            router = Router(CostPolicy(packed, stock, LLAMA_8B, 0.1))
            return [router.decide(forest, lengths) for lengths in steps]

        assert routes() == routes()
        assert len(set(routes())) == 2

    def test_a_decision_is_cheap(self) -> None:
        """Measured: see docs/routing.md. The bound leaves room for busy machines."""
        shipped = shipped_profile()
        packed, stock = shipped.cost("packed", "native"), shipped.cost("stock", "fa3")
        assert packed is not None
        assert stock is not None
        router = Router(CostPolicy(packed, stock, LLAMA_8B, 0.1))
        forest = PrefixForest.from_paths([[(prompt, 0, 4096)] for prompt in range(64) for _ in range(16)])
        lengths = np.full(1024, 5000, dtype=np.int64)
        best = min(timeit.repeat(lambda: router.decide(forest, lengths), number=20, repeat=20)) / 20
        assert best < 200e-6


class TestCostModel:
    def test_parts_add_up(self) -> None:
        for kind, terms in TERMS.items():
            cost = CostModel(kind, dict.fromkeys(terms, 1.5))
            assert sum(cost.parts(STEP, LLAMA_8B).values()) == pytest.approx(cost.microseconds(STEP, LLAMA_8B))

    @pytest.mark.parametrize("kind", ["packed", "stock"])
    @pytest.mark.parametrize("field", ["requests", "tokens", "nodes", "links", "longest_range", "longest_request"])
    def test_more_work_never_takes_less_time(self, kind: str, field: str) -> None:
        cost = CostModel(kind, dict.fromkeys(TERMS[kind], 1.0))  # type: ignore[index, arg-type]
        more = dataclasses.replace(STEP, **{field: getattr(STEP, field) + 8})
        assert cost.microseconds(more, LLAMA_8B) >= cost.microseconds(STEP, LLAMA_8B)

    def test_an_unknown_term_is_named(self) -> None:
        with pytest.raises(ValueError, match="no term 'lunch' in the cost of packed steps; there are launch, "):
            CostModel("packed", {"lunch": 1.0})

    @pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
    def test_an_impossible_coefficient_is_named(self, value: float) -> None:
        with pytest.raises(ValueError, match="term 'launch' costs"):
            CostModel("stock", {"launch": value})


class TestProfileFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        made = profile({"launch": 3.0}, {"unique_mb": 0.25})
        made.save(tmp_path / "p.json")
        assert load_profile(tmp_path / "p.json") == made

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileError, match=r"p\.json: cannot read the profile: No such file"):
            load_profile(tmp_path / "p.json")

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

    def test_something_else_than_json(self, tmp_path: Path) -> None:
        (tmp_path / "p.json").write_text("launch: 3", encoding="utf-8")
        with pytest.raises(ProfileError, match=r"not a routing profile: the file is not JSON"):
            load_profile(tmp_path / "p.json")

    def test_the_deprecated_key_is_read_with_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path, made = tmp_path / "p.json", profile({"launch": 3.0}, {"unique_mb": 0.25})
        content = made.model_dump()
        content["inner"] = content.pop("stock")
        path.write_text(json.dumps(content), encoding="utf-8")
        assert load_profile(path) == made
        assert f"{path}: 'inner' is deprecated" in caplog.text
        path.write_text(json.dumps(content | {"stock": content["inner"]}), encoding="utf-8")
        with pytest.raises(ProfileError, match="'inner' is the deprecated name of 'stock', and both are given"):
            load_profile(path)

    @pytest.mark.parametrize(
        ("gpu", "found"), [("NVIDIA H200", True), ("NVIDIA H200 NVL", False), ("NVIDIA H200 MIG 1g.18gb", False),
                           ("NVIDIA H100 80GB HBM3", False), ("", False)],
    )  # fmt: skip
    @pytest.mark.parametrize("kv_bytes", [1, 2])
    def test_the_packages_profiles_are_for_the_h200_alone(self, gpu: str, found: bool, kv_bytes: int) -> None:
        shipped = shipped_profile_for(gpu, "native", "flashinfer_tc", kv_bytes)
        assert (shipped is not None) == found
        assert shipped is None or shipped.kv_bytes == kv_bytes

    def test_a_kernel_that_was_not_measured_has_no_cost(self) -> None:
        made: Profile = profile({}, {})
        assert made.cost("packed", "triton") is None
