"""The planner's estimate of when the last worker is done."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.native_build import ROOT, built_module


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """What no user needs is not in the native module."""
    sources = [Path(__file__).with_name("queue_model_check.cpp"), ROOT / "csrc" / "plan" / "queue_model.cpp"]
    return built_module("queue_model_check", sources, options=["-O2"], depends=sources[:1])


@pytest.mark.parametrize("seed", range(300))
def test_an_estimate_with_a_limit_is_not_later_and_exact_below_it(seed: int, check: ModuleType) -> None:
    rng = np.random.default_rng(seed)
    longest = 10 ** rng.uniform(-6, -4)
    work_tiles = [
        (longest * rng.uniform(0.01, 1, int(rng.integers(0, 600))) ** rng.uniform(0.3, 3)).tolist() for _ in range(2)
    ]
    batch = (int(rng.integers(1, 265)), *work_tiles, longest, bool(rng.random() < 0.5))
    exact = check.finish(*batch, math.inf)
    for share in (0.1, 0.5, 0.8, 0.9, 0.95, 0.97, 0.99, 0.999, 1.001, 1.05, 2):
        limit = share * exact
        found = check.finish(*batch, limit)
        assert found == exact if exact < limit else limit <= found <= exact
