"""Numbers of an explanation, and how they are printed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.workloads import Case, draw_set
from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.explain.batch import InputError, describe, parse_tree
from sgl_prefix_attn.explain.report import Explanation, explain, item_classes
from sgl_prefix_attn.explain.route import Machine
from sgl_prefix_attn.explain.text import render
from sgl_prefix_attn.routing import conservative, rule
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures, token_bytes
from tests.core.plan_checks import random_forest

SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
H200 = Machine(DeviceModel.gpu(132), rule.KernelPair("NVIDIA H200", "9.0", "native", "fa3"), 4.8e12)
KINDS = ("shared", "private")
Capture = pytest.CaptureFixture[str]


def explained(tree: str) -> Explanation:
    return explain(parse_tree(tree), SHAPE, H200)


def explain_case(case: Case, folder: Path, *options: str) -> None:
    """Runs the command on a drawn batch, with its heads and types."""
    batch = {"paths": case.paths, "seq_lens": case.seq_lens}
    (folder / "batch.json").write_text(json.dumps(batch), encoding="utf-8")
    shape = case.shape
    heads = ["--heads", f"{shape.q_heads}/{shape.kv_heads}", "--head-dim", str(shape.head_dim)]
    heads += ["--kv-dtype", "bf16" if shape.kv_bytes == 2 else "fp8"]
    assert main(["explain", "--batch", str(folder / "batch.json"), *heads, *options]) == 0


def test_reads_of_one_shared_prompt() -> None:
    explanation = explained("1,10/4096,416")
    numbers = json.loads(json.dumps(explanation.to_json()))
    assert numbers["kv_tokens"] == {"packed": 8256, "per_request": 45120, "limit": 8256}
    assert numbers["kv_bytes"]["packed"] == 8256 * 2 * 8 * 128 * 2
    assert explanation.shared_share == pytest.approx(4096 / 4512)
    assert numbers["work_items"] == sum(of["items"] for of in numbers["item_classes"]) >= 11
    tokens = {kind: sum(of["kv_tokens"] for of in numbers["item_classes"] if of["kind"] == kind) for kind in KINDS}
    assert tokens == {"shared": 4096, "private": 4160}
    assert numbers["partial_bytes"] == 2 * explanation.plan.num_partials * 32 * (128 * 4 + 4)
    assert numbers["floor_seconds"] == pytest.approx(8256 * 4096 / 4.8e12)
    assert numbers["route"]["saved_mib"] == 9 * 4096 / 256
    assert numbers["plan_seconds"] > 0


def test_nothing_shared_is_nothing_gained() -> None:
    explanation = explained("16/1024")
    assert explanation.plan.kv_tokens_packed == explanation.plan.kv_tokens_per_request
    assert explanation.shared_share == 0
    assert "Forest: nothing is shared\n  16 private tails of 1,024 tokens\n" in render(explanation)


def test_unusable_batch_and_shape() -> None:
    batch = describe("mine", [[(1, 0, 8)], [(1, 0, 9)]], [10, 10])
    with pytest.raises(InputError, match=r"^mine: request 1, segment 0 .* another request has this node"):
        explain(batch, SHAPE, H200)
    with pytest.raises(InputError):
        explain(parse_tree("1,2/64,16"), ModelShape(q_heads=10, kv_heads=4, head_dim=128), H200)


@pytest.mark.parametrize("stock", ["fa3", "flashinfer", "triton"])
def test_the_route_is_that_of_the_rule_over_the_stock_backend(stock: str, tmp_path: Path, capsys: Capture) -> None:
    option = () if stock == "fa3" else ("--stock", stock)  # fa3 is the default
    found = set()
    for case in [case for case in draw_set(32, 18) if case.shape.kv_bytes == 2]:
        step = StepFeatures.of(ForestFacts.of(case.forest()), case.lengths)
        explain_case(case, tmp_path, "--device", "h200", "--json", *option)
        route = json.loads(capsys.readouterr().out)["route"]
        of_stock = rule.RULES[stock, 2]
        assert (route["stock"], route["rule"]) == (stock, str(of_stock))
        assert route["saved_mib"] == pytest.approx(step.saved_tokens * token_bytes(case.shape) / 2**20)
        assert route["route"] == ("packed" if of_stock.packs(step, case.shape) else "stock")
        found.add(route["route"])
    assert found == {"packed", "stock"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("h100", ("sharing saves 1,008.0 of 1,128.0 MiB", f"packed if {rule.RULES['fa3', 2]}")),
        ("h200 --stock flashinfer", ("stock flashinfer: packed", f"packed if {rule.RULES['flashinfer', 2]}")),
        ("a100", ("stock fa3: packed", f"packed if {conservative.rule('triton')}")),
        ("h200 --kv-dtype fp32", ("sharing saves 2,016.0", f"packed if {conservative.rule('native')}")),
        ("cpu", ("Route: packed, as every step of these kernels; sharing saves 1,008.0 of 1,128.0 MiB of KV a layer",)),
        ("h200 --query-len 8", ("Route: none, other rules decide prefill, mixed and verify steps",)),
        (
            "h200 --head-dim 96",
            ("Route: none, no native kernel has head_dim 96: such layers run on the stock backend",),
        ),
    ],
)
def test_what_decides_is_told(options: str, told: tuple[str, ...], capsys: Capture) -> None:
    assert main(["explain", "--tree", "1,64/4096,416", "--device", *options.split()]) == 0
    text = capsys.readouterr().out
    assert [words for words in told if words not in text] == []
    assert ("Floor of a layer: " in text) == (options != "cpu")


@pytest.mark.parametrize("seed", range(20))
def test_item_classes_account_for_every_position_that_the_plan_reads(seed: int) -> None:
    forest, seq_lens, query_lens = random_forest(np.random.default_rng(seed), 24, (1, 40)[seed % 2], scale=700)
    plan = Planner(SHAPE, H200.model).plan(forest, seq_lens, query_lens)
    found = item_classes(plan, seq_lens, SHAPE.q_heads // SHAPE.kv_heads)
    assert sum(of.items for of in found) == len(plan.items)
    assert sum(of.kv_tokens for of in found) == plan.kv_tokens_packed
    assert all(0 < of.rows_filled <= 1 for of in found)
    assert [(of.kind == "private", -of.tile_rows) for of in found] == sorted(
        {(of.kind == "private", -of.tile_rows) for of in found}
    )
