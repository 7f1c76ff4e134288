"""The rule behind `auto`: its thresholds, where it holds, and its regret on seeds that had no part in its choice."""

from __future__ import annotations

import dataclasses
import timeit

import numpy as np
import pytest

from benchmarks.doc_kernel_tables import JUDGES, outcomes_of
from sgl_prefix_attn.abtest.judge import judge
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import rule
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.policy import FixedPolicy, Route, Router, policy_of
from sgl_prefix_attn.routing.policy_names import parse
from sgl_prefix_attn.routing.rule import KernelPair, RulePolicy, auto
from tests.routing.test_features import features

SHAPE = ModelShape(32, 8, 128)  # 4 KiB of KV for a token of a layer: 256 tokens have 1 MiB
NATIVE = KernelPair("NVIDIA H200", "9.0", "native", "fa3")


def packs(stock: str, requests: int, shared: int, own: int, shape: ModelShape = SHAPE) -> bool:
    step = features([[(0, 0, shared)] if shared else []] * requests, [shared + own] * requests)
    policy = auto(dataclasses.replace(NATIVE, stock=stock), shape)
    return policy.decide(step) is Route.PACKED


@pytest.mark.parametrize(
    ("stock", "requests", "shared", "own", "packed"),
    [
        ("fa3", 2, 4096, 1, True),  # 16 MiB saved
        ("fa3", 2, 4095, 1, False),
        ("flashinfer", 2, 3072, 1, True),  # 12
        ("flashinfer", 2, 3071, 1, False),
        ("triton", 2, 3072, 1, True),
        ("fa3", 16, 0, 512, True),  # 32 MiB, short requests
        ("fa3", 16, 0, 511, False),
        ("fa3", 16, 0, 1023, True),
        ("fa3", 16, 0, 1024, False),
        ("flashinfer", 16, 0, 512, True),
        ("flashinfer", 16, 0, 511, False),
        ("flashinfer", 16, 0, 5000, True),  # of any length
        ("flashinfer", 15, 0, 5000, False),
        ("triton", 1, 0, 8192, True),
        ("triton", 1, 0, 8191, False),
    ],
)
def test_thresholds(stock: str, requests: int, shared: int, own: int, packed: bool) -> None:
    assert packs(stock, requests, shared, own) is packed


def test_the_bytes_count_not_the_tokens() -> None:
    assert packs("fa3", 2, 4096, 1)
    assert not packs("fa3", 2, 4096, 1, ModelShape(32, 4, 128))
    assert packs("fa3", 2, 8192, 1, ModelShape(32, 4, 128))
    assert packs("fa3", 2, 8192, 1, ModelShape(32, 8, 64))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, RulePolicy),
        ({"gpu": "NVIDIA H100 80GB HBM3", "stock": "triton"}, RulePolicy),
        ({"gpu": "NVIDIA B200", "capability": "10.0"}, ConservativePolicy),
        ({"packed": "triton"}, ConservativePolicy),
        ({"stock": "trtllm_mha"}, ConservativePolicy),
        ({"stock": "torch_native"}, FixedPolicy),
        ({"gpu": "cpu", "capability": "", "packed": "cpu"}, FixedPolicy),
    ],
)
def test_where_it_holds(change: dict[str, str], kind: type) -> None:
    policy = auto(dataclasses.replace(NATIVE, **change), SHAPE)
    assert isinstance(policy, kind)
    assert not isinstance(policy, FixedPolicy) or policy.route is Route.PACKED


def test_8_bit_kv_was_measured_over_flashinfer_alone() -> None:
    for stock, kv_bytes, kind in (("flashinfer", 1, RulePolicy), ("fa3", 1, ConservativePolicy),
                                  ("triton", 1, ConservativePolicy), ("fa3", 4, ConservativePolicy)):  # fmt: skip
        found = auto(dataclasses.replace(NATIVE, stock=stock), ModelShape(32, 8, 128, kv_bytes=kv_bytes))
        assert isinstance(found, kind)


def test_a_rule_says_its_thresholds() -> None:
    assert str(rule.RULES["fa3", 2]) == (
        "sharing saves 16 MiB of KV a layer, or if it has 32 MiB of KV and requests have fewer than 1024 tokens"
    )
    assert str(rule.RULES["flashinfer", 2]).endswith("or if it has 32 MiB of KV and at least 16 requests run")


@pytest.mark.parametrize("title", JUDGES)
@pytest.mark.parametrize(("stock", "regret", "behind"), [("fa3", 0.0105, 0), ("flashinfer", 0.007, 3)])
def test_regret_on_seeds_that_had_no_part_in_the_choice(title: str, stock: str, regret: float, behind: int) -> None:
    found = {
        name: judge([each for file in JUDGES[title] for each in outcomes_of(file, name, stock)])
        for name in ("auto", "conservative")
    }
    assert found["auto"].steps > 400
    assert found["auto"].mean_regret < regret < found["conservative"].mean_regret / 20
    assert found["auto"].behind <= behind
    assert found["auto"].worst[0] < 0.045
    assert found["auto"].gain > 0.99 * found["auto"].oracle


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["auto", "conservative", "packed", "batch>=1", "reuse>=1", "saved>=1"])
def test_a_step_without_requests_has_a_route(name: str, rows: int) -> None:
    policy = policy_of(parse(name), SHAPE, auto(NATIVE, SHAPE), ConservativePolicy(SHAPE, "native"))
    assert Router(policy).decide(PrefixForest.from_paths([]), np.zeros(0, dtype=np.int64), rows) in Route


def test_a_decision_is_cheap() -> None:
    """Measured: see docs/routing.md. The bound leaves room for busy machines."""
    router = Router(auto(NATIVE, SHAPE))
    forest = PrefixForest.from_paths([[(prompt, 0, 4096)] for prompt in range(64) for _ in range(16)])
    lengths = np.full(1024, 5000, dtype=np.int64)
    best = min(timeit.repeat(lambda: router.decide(forest, lengths), number=20, repeat=20)) / 20
    assert best < 100e-6
