"""When a verify step runs packed: the rule on measured steps, and in a server's router."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sgl_prefix_attn.abtest.judge import Verdict, judge, outcomes
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.gpu import H200
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import conservative, verify
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.measured import Results, read_results
from sgl_prefix_attn.routing.policy import Route
from sgl_prefix_attn.routing.policy_names import parse
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from tests.routing.test_features import features
from tests.support.schedulers import step_router

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPE = ModelShape(32, 8, 128)


def verdict(results: Results, policy: str) -> Verdict:
    return judge(outcomes(results, parse(policy), "native", "fa3"))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("verify_*.json")), ids=lambda path: path.stem)
def test_measured_steps_run_where_they_are_faster(path: Path) -> None:
    results = read_results(path)
    found = verdict(results, "auto")
    assert found.regret < 0.031
    assert found.behind <= 0.1 * found.steps
    assert found.worst[0] < 0.26
    assert verdict(results, "conservative").regret > 3 * found.regret


def test_the_seeds_of_an_h100_which_no_bound_was_chosen_by() -> None:
    for name, gain in (("h100_4_2586728830", 1.61), ("h100_8_1806084533", 1.28)):
        found = verdict(read_results(RESULTS / f"verify_{name}.json"), "auto")
        assert found.regret < 0.006
        assert found.gain > gain
        assert found.behind <= 3


def test_bounds() -> None:
    forest = [[(0, 0, 2000)]] * 32

    def packs(rows: int, shape: ModelShape, requests: int = 32, length: int = 2300) -> bool:
        step = features(forest[:requests], [length] * requests)
        return verify.packs(StepFeatures(**{**step.__dict__, "rows": rows}), shape)

    assert packs(4, SHAPE)
    assert not packs(4, SHAPE, requests=1)  # nothing is read twice
    assert not packs(4, ModelShape(4, 1, 128), requests=3)  # saves 2.0 MB, 2 MiB are needed
    assert packs(4, ModelShape(64, 4, 128))  # 64 rows
    assert not packs(8, ModelShape(64, 4, 128))  # 128 rows
    assert packs(7, ModelShape(64, 4, 128))
    assert packs(127, ModelShape(1, 1, 128))
    assert packs(63, ModelShape(8, 8, 128), requests=2)
    assert packs(4, ModelShape(64, 4, 128), requests=6, length=2010)
    assert not packs(4, ModelShape(64, 4, 128), requests=5)
    # 32 requests save 3 times their partial results from 806 tokens on; without maximum and sum, from 793 on.
    for shared, enough in ((800, False), (806, True)):
        step = features([[(0, 0, shared)]] * 32, [1100] * 32)
        assert verify.packs(StepFeatures(**{**step.__dict__, "rows": 4}), ModelShape(64, 4, 128)) is enough
    deep = StepFeatures(32, 73600, 11600, 320, 4)  # ten partial results a request
    assert not verify.packs(deep, ModelShape(64, 4, 128))
    assert verify.packs(deep, SHAPE)


def test_what_was_not_measured_is_decided_by_the_conservative_rule() -> None:
    for kernels, stock, shape in (
        ("triton", "fa3", SHAPE), ("native", "flashinfer", SHAPE), ("native", "fa3", ModelShape(32, 8, 64)),
        ("native", "fa3", ModelShape(32, 8, 128, kv_bytes=1)),
    ):  # fmt: skip
        found = verify.policy(H200.name, kernels, stock, shape)
        assert isinstance(found, conservative.ConservativePolicy)
        assert str(found) == conservative.rule(kernels)
    assert isinstance(verify.policy("NVIDIA H20", "native", "fa3", SHAPE), conservative.ConservativePolicy)
    found = verify.policy(H200.name, "native", "fa3", SHAPE)
    assert "2 MiB" in str(found)


@pytest.mark.parametrize(("route", "requests", "expected"), [("auto", 32, "packed"), ("batch>=64", 32, "stock")])
def test_a_servers_router_decides_by_the_rule(route: str, requests: int, expected: str) -> None:
    router = step_router(SHAPE, drafts=4, route=route)
    new = np.full(requests, 4, dtype=np.int64)
    for shared, found in ((4096, expected), (0, "stock")):
        forest = PrefixForest.from_paths([[(1, 0, shared)] if shared else []] * requests)
        step = StepPaths(forest, "verify", requests, new)
        assert router.decide(step, np.full(requests, 4400, dtype=np.int64)) is Route(found)
    assert router.state()["policy"] == {"auto": "verify rule"}.get(route, route)
    assert router.state()["last"] == {"route": "stock", "saved_mib": 0.0, "kv_mib": 550.0, "requests": 32}
    assert router.state()["rule"] == {"auto": verify.RULE}.get(route)


@pytest.mark.parametrize(
    ("shape", "stock", "route", "policy"),
    [
        (SHAPE, "fa3", "batch>=2 and auto", "batch>=2 and verify rule"),
        (SHAPE, "flashinfer", "auto", "conservative"),
        (SHAPE, "triton", "auto and conservative", "conservative"),
        (ModelShape(32, 8, 64), "fa3", "auto", "conservative"),
        (None, "fa3", "auto", "auto"),
    ],
)
def test_a_server_names_the_rule_that_decides(shape: ModelShape | None, stock: str, route: str, policy: str) -> None:
    assert step_router(shape, stock, drafts=4, route=route).state()["policy"] == policy
