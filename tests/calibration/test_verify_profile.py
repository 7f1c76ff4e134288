"""Verify steps in a profile: fitted from results files beside decode steps, and used by a server's router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.kernel import mixed_steps
from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.cost import TERMS, CostModel, Kind
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.policy import Route, cost_policy
from sgl_prefix_attn.routing.profile import Profile, ProfileError, load_profile, parse_profile
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from tests.support.schedulers import step_router

SHAPE = ModelShape(32, 8, 128)
TRUE = {
    "packed": CostModel("packed", {"launch": 12, "unique_mb": 0.24, "shared_gflop": 1.5, "own_gflop": 3, "links": 2}),
    "stock": CostModel("stock", {"launch": 6, "unique_mb": 0.24, "repeated_mb": 0.2, "gflop": 2.5}),
}


def results(drafts: int) -> dict[str, Any]:
    """Results of drawn steps with `drafts` rows a request, as the benchmark writes them, with times by `TRUE`."""
    rows = []
    for step in mixed_steps.draw_verify(drafts, 40, drafts):
        row = mixed_steps.described(step)
        features, shape = StepFeatures(**row["step"]), step.case.shape
        times = {kind: cost.microseconds(features, shape) for kind, cost in TRUE.items()}
        found = {"prefixpack": {"cold_us": times["packed"]}, "fa3": {"cold_us": times["stock"]}}
        rows.append({**row, "baselines": {**found, "split": {"failed": "no prefill rows"}}})
    return {"machine": {"gpu": "NVIDIA H200", "date": "2026-11-23"}, "commit": "0" * 7, "rows": rows}


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    for drafts in (1, 4, 8):
        (folder / f"{drafts}.json").write_text(json.dumps(results(drafts)))
    out = folder / "profile.json"
    sources = [str(folder / f"{drafts}.json") for drafts in (1, 4, 8)]
    assert main(["calibrate", "--from", *sources, "--out", str(out), "--check", sources[1]]) == 0
    return out


def test_decode_and_verify_steps_have_fits_of_their_own(profile_path: Path) -> None:
    profile = load_profile(profile_path)
    assert profile.verify is not None
    assert profile.verify.rows == [4, 8]
    assert profile.packed["native"].cases + profile.verify.packed["native"].cases > 90
    assert "own_gflop" not in profile.packed["native"].us  # decode steps have one row a request
    assert profile.verify.packed["native"].us["own_gflop"] == pytest.approx(3, rel=0.01)
    assert profile.verify.stock["fa3"].error < 1e-3
    for rows, known in ((1, True), (2, False), (4, True), (6, True), (8, True), (9, False)):
        assert (profile.cost("packed", "native", rows) is not None) is known
    verify = profile.verify.model_copy(update={"margins": {"native": {"fa3": 33}}})
    policy = cost_policy(profile.model_copy(update={"verify": verify}), "native", "fa3", SHAPE, 4)
    assert policy is not None
    assert policy.margin == 0.33


@pytest.mark.parametrize("kind", ["packed", "stock"])
def test_more_rows_never_cost_less(kind: Kind) -> None:
    steps = [StepFeatures(64, 90_000, 30_000, 80_000, 9, 130, 4_000, 9_000, rows) for rows in (1, 2, 4, 8, 64)]
    for name in TERMS[kind]:
        values = [CostModel(kind, {name: 1.0}).microseconds(step, SHAPE) for step in steps]
        assert values == sorted(values)


def routed(
    profile: Path | None, drafts: int, shared: int, requests: int = 32, margin: int | None = None
) -> tuple[Route, float | None]:
    path = None if profile is None else str(profile)
    router = step_router(SHAPE, drafts=drafts, route_profile=path, route_margin=margin)
    forest = PrefixForest.from_paths([[(1, 0, shared)] if shared else []] * requests)
    new = np.full(requests, drafts, dtype=np.int64)
    step = StepPaths(forest, "verify", requests, requests, new)
    route = router.decide(step, np.full(requests, 8192 + drafts, dtype=np.int64))
    return route, router.state()["last"]["packed_us"]


def test_a_router_predicts_verify_steps_between_the_measured_ones(profile_path: Path) -> None:
    for drafts in (4, 6, 8):
        route, packed_us = routed(profile_path, drafts, 8192)
        assert route is Route.PACKED
        assert packed_us is not None
        assert routed(profile_path, drafts, 0)[0] is Route.STOCK
    assert routed(profile_path, 16, 8192) == (Route.STOCK, None)  # by the rule: too few requests
    assert routed(profile_path, 16, 8192, requests=64) == (Route.PACKED, None)
    assert routed(profile_path, 4, 8192, margin=1000)[0] is Route.STOCK
    assert routed(None, 16, 8192) == (Route.STOCK, None)  # as with the shipped profile


def test_an_unknown_term_of_verify_steps_is_refused(profile_path: Path) -> None:
    content = Profile.model_dump(load_profile(profile_path))
    content["verify"]["stock"]["fa3"]["us"]["unheard_of"] = 1.0
    with pytest.raises(ProfileError, match="no term 'unheard_of'"):
        parse_profile(json.dumps(content), "p.json")
