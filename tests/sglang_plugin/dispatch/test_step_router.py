"""Which profile decode steps are routed by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.policy import Route
from sgl_prefix_attn.routing.profile import shipped_profile
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch import step_router
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from tests.routing.profiles import write_profile


@pytest.mark.parametrize(
    ("stock_name", "kv_bytes", "profile_of"),
    [("flashinfer", 2, 2), ("flashinfer", 1, 1), ("triton", 1, 2)],
    ids=["16-bit KV", "fp8 KV", "fp8 KV over a kernel that was measured with 16 bits only"],
)
def test_the_profile_is_of_the_servers_kv(
    stock_name: str, kv_bytes: int, profile_of: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    planner = SimpleNamespace(shape=ModelShape(32, 8, 128, kv_bytes=kv_bytes))
    executor: Any = SimpleNamespace(kernels="native", planners=[planner])
    routes = StepRouter(Settings(metrics=False), Counters(), executor, stock_name, SimpleNamespace())
    assert routes.may_change("decode")
    expected = shipped_profile(profile_of)
    assert routes.state()["profile"] == f"{expected.machine}, commit {expected.commit}"
    assert ("measured with 16-bit KV; of 8 bits" in caplog.text) == (kv_bytes != profile_of)


@pytest.mark.parametrize("set_by_user", [None, 0, 37])
def test_the_margin_is_the_profiles_unless_set(set_by_user: int | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    executor: Any = SimpleNamespace(kernels="native", planners=[SimpleNamespace(shape=ModelShape(32, 8, 128))])
    settings = Settings(metrics=False, route_margin=set_by_user)
    assert StepRouter(settings, Counters(), executor, "flashinfer", SimpleNamespace()).may_change("decode")
    expected = shipped_profile().margin("native", "flashinfer_tc") if set_by_user is None else set_by_user
    assert f"margin {expected} %" in caplog.text


class TestWithoutAProfileForTheGpu:
    """Requests share one prefix; without a prediction a step runs packed only where the gain is large on every GPU."""

    @pytest.fixture(params=["NVIDIA B200", "NVIDIA H200 NVL"])
    def gpu(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(step_router, "_gpu_name", lambda: request.param)
        return str(request.param)

    @staticmethod
    def routed(requests: int, shared: int, own: int, kv_heads: int = 8, **settings: Any) -> tuple[Route, StepRouter]:
        executor: Any = SimpleNamespace(
            kernels="native", planners=[SimpleNamespace(shape=ModelShape(32, kv_heads, 128))]
        )
        stock = SimpleNamespace()
        routes = StepRouter(Settings(metrics=False, **settings), Counters(), executor, "flashinfer", stock)
        assert routes.may_change("decode")
        paths: Any = SimpleNamespace(mode="decode", forest=PrefixForest.from_paths([[(1, 0, shared)]] * requests))
        return routes.decide(paths, np.full(requests, shared + own, dtype=np.int64)), routes

    @pytest.mark.parametrize(
        ("requests", "shared", "own", "kv_heads", "expected"),
        [
            (64, 4096, 100, 8, Route.PACKED),
            (63, 4096, 100, 8, Route.STOCK),
            (64, 128, 124, 4, Route.PACKED),  # 64 * 252 tokens, of which 128 + 64 * 124 are distinct
            (64, 128, 125, 4, Route.STOCK),
            (64, 4096, 100, 2, Route.STOCK),
            (1024, 8192, 8, 3, Route.STOCK),
        ],
    )
    def test_steps_go_by_the_conservative_rule(
        self, gpu: str, requests: int, shared: int, own: int, kv_heads: int, expected: Route
    ) -> None:
        assert self.routed(requests, shared, own, kv_heads)[0] is expected

    def test_it_is_said_with_a_warning_and_in_the_state(self, gpu: str, caplog: pytest.LogCaptureFixture) -> None:
        _, routes = self.routed(64, 4096, 100)
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert f"no routing profile for {gpu}, so a decode step runs packed only if at least 64" in record.getMessage()
        state = routes.state()
        assert (state["profile"], state["last"]) == (None, {"route": "packed", "packed_us": None, "stock_us": None})

    def test_the_users_own_profile_is_used_on_any_gpu(self, gpu: str, tmp_path: Path) -> None:
        path = write_profile(tmp_path, {"launch": 1.0}, {"launch": 9.0}, kernels="native", backend="flashinfer_tc")
        route, routes = self.routed(1, 16, 16, route_profile=path)
        assert route is Route.PACKED
        assert routes.state()["profile"] == "made by hand, commit none"
