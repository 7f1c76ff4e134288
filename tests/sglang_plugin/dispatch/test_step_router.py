"""Which profile decode steps are routed by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.profile import shipped_profile
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters


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
    assert routes.may_change
    expected = shipped_profile(profile_of)
    assert routes.state()["profile"] == f"{expected.machine}, commit {expected.commit}"
    assert ("measured with 16-bit KV; of 8 bits" in caplog.text) == (kv_bytes != profile_of)


@pytest.mark.parametrize("set_by_user", [None, 0, 37])
def test_the_margin_is_the_profiles_unless_set(set_by_user: int | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    executor: Any = SimpleNamespace(kernels="native", planners=[SimpleNamespace(shape=ModelShape(32, 8, 128))])
    settings = Settings(metrics=False, route_margin=set_by_user)
    assert StepRouter(settings, Counters(), executor, "flashinfer", SimpleNamespace()).may_change
    expected = shipped_profile().margin("native", "flashinfer_tc") if set_by_user is None else set_by_user
    assert f"margin {expected} %" in caplog.text
