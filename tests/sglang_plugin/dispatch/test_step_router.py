"""Which profile decode steps are routed by."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.policy import Route
from sgl_prefix_attn.routing.profile import SHIPPED, ProfileError, shipped_profile
from sgl_prefix_attn.routing.profile_store import ProfileStore
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import rank_profiles
from sgl_prefix_attn.sglang_plugin.dispatch import live_policy
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from tests.routing.profiles import write_profile
from tests.support.schedulers import step_router


@pytest.mark.parametrize(
    ("stock_name", "kv_bytes", "profile_of"),
    [("flashinfer", 2, 2), ("flashinfer", 1, 1), ("triton", 1, 2)],
    ids=["16-bit KV", "fp8 KV", "fp8 KV over a kernel that was measured with 16 bits only"],
)
def test_the_profile_is_of_the_servers_kv(stock_name, kv_bytes, profile_of, caplog):
    caplog.set_level("INFO")
    routes = step_router(ModelShape(32, 8, 128, kv_bytes=kv_bytes), stock_name)
    assert routes.may_change("decode")
    expected = shipped_profile(profile_of)
    assert routes.state()["profile"] == f"{expected.machine}, commit {expected.commit}"
    assert routes.state()["profile_from"] == f"shipped profile {SHIPPED[profile_of]}"
    assert ("measured with 16-bit KV; of 8 bits" in caplog.text) == (kv_bytes != profile_of)


@pytest.mark.parametrize("set_by_user", [None, 0, 37])
def test_the_margin_is_the_profiles_unless_set(set_by_user: int | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert step_router(ModelShape(32, 8, 128), "flashinfer", route_margin=set_by_user).may_change("decode")
    expected = shipped_profile().margin("native", "flashinfer_tc") if set_by_user is None else set_by_user
    assert f"margin {expected} %" in caplog.text


class TestWithoutAProfileForTheGpu:
    """Requests share one prefix; without a prediction a step runs packed only where the gain is large on every GPU."""

    @pytest.fixture(params=["NVIDIA B200", "NVIDIA H200 NVL"])
    def gpu(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(live_policy, "gpu_name", lambda: (request.param, "9.0"))
        return str(request.param)

    @staticmethod
    def routed(requests: int, shared: int, own: int, kv_heads: int = 8, **settings: Any) -> tuple[Route, StepRouter]:
        routes = step_router(ModelShape(32, kv_heads, 128), "flashinfer", **settings)
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
    def test_steps_go_by_the_conservative_rule(self, gpu, requests, shared, own, kv_heads, expected):
        assert self.routed(requests, shared, own, kv_heads)[0] is expected
        of_triton = Route.STOCK if shared == 128 else expected  # reuse of 2 is too little there
        for route in ("auto", "conservative"):
            assert self.routed(requests, shared, own, kv_heads, kernels="triton", route=route)[0] is of_triton

    def test_it_is_said_with_a_warning_and_in_the_state(self, gpu: str, caplog: pytest.LogCaptureFixture) -> None:
        _, routes = self.routed(64, 4096, 100)
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert f"no routing profile for {gpu}, so a decode step runs packed only if at least 64" in record.getMessage()
        state = routes.state()
        assert state["policy"] == "conservative"
        assert (state["profile"], state["last"]) == (None, {"route": "packed", "packed_us": None, "stock_us": None})

    @pytest.mark.parametrize(
        ("route", "running", "requests", "expected"),
        [
            ("batch>=3", "batch>=3", 2, Route.STOCK),
            ("batch>=3", "batch>=3", 3, Route.PACKED),
            ("reuse>=2 and batch>=3", "reuse>=2 and batch>=3", 3, Route.PACKED),
            ("reuse>=2 and batch>=3", "reuse>=2 and batch>=3", 2, Route.STOCK),
            ("cost and batch>=3", "conservative and batch>=3", 63, Route.STOCK),
            ("cost and batch>=3", "conservative and batch>=3", 64, Route.PACKED),
        ],
    )
    def test_other_policies(self, gpu: str, route: str, running: str, requests: int, expected: Route) -> None:
        taken, routes = self.routed(requests, 4096, 100, route=route)
        assert taken is expected
        state = routes.state()
        assert (state["setting"], state["policy"], state["last"]["route"]) == (route, running, expected.value)

    def test_the_users_own_profile_is_used_on_any_gpu(self, gpu: str, tmp_path: Path) -> None:
        path = write_profile(tmp_path, {"launch": 1.0}, {"launch": 9.0}, kernels="native", backend="flashinfer_tc")
        route, routes = self.routed(1, 16, 16, route_profile=path)
        assert route is Route.PACKED
        assert routes.state()["profile"] == "made by hand, commit none"


@pytest.mark.parametrize(
    ("route", "requests", "expected"),
    [("auto", 1, Route.PACKED), ("batch>=2", 1, Route.STOCK), ("cost and batch>=2", 2, Route.PACKED)],
)
def test_on_a_cpu_without_a_profile_cost_is_no_condition(route: str, requests: int, expected: Route) -> None:
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


class Group:
    """Two tensor-parallel ranks in one process: what rank 0 sends is what rank 1 gets."""

    world_size = 2
    sent: Any = None

    def __init__(self, rank: int) -> None:
        self.rank_in_group = rank

    def broadcast_object(self, obj: Any, src: int) -> Any:
        assert src == 0
        if self.rank_in_group == 0:
            Group.sent = json.loads(json.dumps(obj))
        return Group.sent


def test_ranks_take_the_profiles_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def store(rank: int, **settings: Any) -> ProfileStore:
        monkeypatch.setattr(rank_profiles, "_group", lambda: Group(rank))
        return rank_profiles.profiles_of_ranks(Settings(**settings))

    path = write_profile(tmp_path, {"launch": 1.0}, {"launch": 9.0}, kernels="native", backend="flashinfer_tc")
    first = store(0, route_profile=path)
    second = store(1, route_profile="only on the other host.json")
    assert second.profiles == first.profiles
    with pytest.raises(ProfileError, match="cannot read the profile"):
        store(0, route_profile="nowhere.json")
    with pytest.raises(ProfileError, match=r"nowhere\.json: cannot read the profile"):
        store(1, route_profile=path)


def test_no_rank_waits_for_rank_0_whatever_fails_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(rank_profiles.ProfileStore, "read", fail)
    for rank in (0, 1):
        monkeypatch.setattr(rank_profiles, "_group", lambda rank=rank: Group(rank))
        with pytest.raises(ProfileError, match="cannot read the profiles: MemoryError: no room"):
            rank_profiles.profiles_of_ranks(Settings())
