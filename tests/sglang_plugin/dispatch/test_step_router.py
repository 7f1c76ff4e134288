"""Which rule decode steps are routed by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import rule
from sgl_prefix_attn.routing.policy import Route
from sgl_prefix_attn.sglang_plugin.dispatch import live_policy
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from tests.support.schedulers import step_router


def routed(
    requests: int, shared: int, own: int, kv_heads: int = 8, *, stock: str = "flashinfer", **settings: Any
) -> tuple[Route, StepRouter]:
    """The route of a decode step whose requests share one prefix."""
    routes = step_router(ModelShape(32, kv_heads, 128), stock, **settings)
    assert routes.may_change("decode")
    paths: Any = SimpleNamespace(mode="decode", forest=PrefixForest.from_paths([[(1, 0, shared)]] * requests))
    return routes.decide(paths, np.full(requests, shared + own, dtype=np.int64)), routes


@pytest.mark.parametrize("stock", ["fa3", "flashinfer", "triton"])
@pytest.mark.parametrize(("shared", "expected"), [(4096, Route.PACKED), (2048, Route.STOCK)])
def test_a_server_goes_by_the_rule_and_tells_it(
    stock: str, shared: int, expected: Route, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = rule.RULES[stock, 2]
    route, routes = routed(2, shared, 100, stock=stock)
    assert route is expected
    assert [record.getMessage() for record in caplog.records] == [
        f"prefixpack: a decode step runs packed only if {found}"
    ]
    state = routes.state()
    assert (state["setting"], state["policy"], state["rule"]) == ("auto", "rule", str(found))
    kernels = {"gpu": "NVIDIA H200", "capability": "9.0", "packed": "native", "stock": stock}
    assert state["kernels"] == kernels
    assert state["last"] == {
        "route": expected.value, "saved_mib": shared / 256, "kv_mib": round((shared + 100) / 128, 2), "requests": 2
    }  # fmt: skip


class TestWhatWasNotMeasured:
    """A step runs packed only where the gain is large on every GPU."""

    @pytest.fixture(params=["NVIDIA B200", "NVIDIA L40S"])
    def gpu(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(live_policy, "gpu_name", lambda: (request.param, "8.9"))
        return str(request.param)

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
    def test_steps_go_by_the_conservative_rule(self, gpu, requests, shared, own, kv_heads, expected):
        assert routed(requests, shared, own, kv_heads)[0] is expected
        of_triton = Route.STOCK if shared == 128 else expected  # reuse of 2 is too little there
        for route in ("auto", "conservative"):
            assert routed(requests, shared, own, kv_heads, kernels="triton", route=route)[0] is of_triton

    def test_it_is_said_with_a_warning_and_in_the_state(self, gpu: str, caplog: pytest.LogCaptureFixture) -> None:
        _, routes = routed(64, 4096, 100)
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        said = f"native kernels over flashinfer were not measured on a {gpu}, so a decode step runs packed only if at"
        assert said in record.getMessage()
        state = routes.state()
        assert state["policy"] == "conservative"
        assert state["rule"].startswith("at least 64 requests run")
        assert state["last"] == {"route": "packed", "saved_mib": 1008.0, "kv_mib": 1049.0, "requests": 64}

    @pytest.mark.parametrize(
        ("route", "running", "requests", "expected"),
        [
            ("batch>=3", "batch>=3", 2, Route.STOCK),
            ("batch>=3", "batch>=3", 3, Route.PACKED),
            ("reuse>=2 and batch>=3", "reuse>=2 and batch>=3", 3, Route.PACKED),
            ("reuse>=2 and batch>=3", "reuse>=2 and batch>=3", 2, Route.STOCK),
            ("auto and batch>=3", "conservative and batch>=3", 63, Route.STOCK),
            ("auto and batch>=3", "conservative and batch>=3", 64, Route.PACKED),
        ],
    )
    def test_other_policies(self, gpu: str, route: str, running: str, requests: int, expected: Route) -> None:
        taken, routes = routed(requests, 4096, 100, route=route)
        assert taken is expected
        state = routes.state()
        assert (state["setting"], state["policy"], state["last"]["route"]) == (route, running, expected.value)


@pytest.mark.parametrize(
    ("route", "requests", "expected"),
    [("auto", 1, Route.PACKED), ("batch>=2", 1, Route.STOCK), ("auto and batch>=2", 2, Route.PACKED)],
)
def test_on_a_cpu_auto_is_no_condition(route: str, requests: int, expected: Route) -> None:
    routes = step_router(ModelShape(4, 2, 16, kv_bytes=4), "torch_native", kernels="cpu", route=route)
    assert routes.may_change("decode") == (route != "auto")
    paths: Any = SimpleNamespace(mode="decode", forest=PrefixForest.from_paths([[(1, 0, 8)]] * requests))
    assert routes.decide(paths, np.full(requests, 9, dtype=np.int64)) is expected


def test_each_microbatch_keeps_its_stock_route() -> None:
    """Two take turns; one of them gets another request, whose paths are new."""
    routes = step_router(ModelShape(32, 8, 128), "flashinfer", microbatches=2, route="batch>=9")
    assert routes.may_change("decode")
    lens = np.full(2, 9, dtype=np.int64)

    def batch() -> Any:
        return SimpleNamespace(mode="decode", forest=PrefixForest.from_paths([[(1, 0, 8)]] * 2))

    def kept(paths: Any) -> bool:
        return routes.stays_stock(paths) or routes.decide(paths, lens) is not Route.STOCK

    steady, others = batch(), [batch() for _ in range(2 * STEPS_BETWEEN_PLANS)]
    assert [kept(paths) for paths in (steady, others[0], steady, others[0])] == [False, False, True, True]
    for number, other in enumerate(others[1:], 2):
        assert kept(steady) == (number % STEPS_BETWEEN_PLANS != 0)
        assert not kept(other)
