"""Numbers of an explanation, and how they are printed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.explain.batch import InputError, describe, parse_tree
from sgl_prefix_attn.explain.prediction import Machine
from sgl_prefix_attn.explain.report import Explanation, explain, item_classes
from sgl_prefix_attn.explain.text import render
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.policy import CostPolicy
from sgl_prefix_attn.routing.profile import shipped_profile
from sgl_prefix_attn.routing.profile_store import ProfileStore, ServerFacts
from sgl_prefix_attn.workloads import Case, draw_set
from tests.core.plan_checks import random_forest

SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
FACTS = ServerFacts("NVIDIA H200", "9.0", SHAPE, "bf16", "native", "fa3")
H200 = Machine(DeviceModel.gpu(132), FACTS)
NO_PROFILES = ProfileStore([], [])
KINDS = ("shared", "private")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_profiles_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def explained(tree: str) -> Explanation:
    return explain(parse_tree(tree), SHAPE, H200, NO_PROFILES)


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
    assert numbers["gain"].keys() == {"none"}
    assert numbers["plan_seconds"] > 0


def test_nothing_shared_is_nothing_gained() -> None:
    explanation = explained("16/1024")
    assert explanation.plan.kv_tokens_packed == explanation.plan.kv_tokens_per_request
    assert explanation.shared_share == 0
    assert "Forest: nothing is shared\n  16 private tails of 1,024 tokens\n" in render(explanation)


def test_unusable_batch_and_shape() -> None:
    batch = describe("mine", [[(1, 0, 8)], [(1, 0, 9)]], [10, 10])
    with pytest.raises(InputError, match=r"^mine: request 1, segment 0 .* another request has this node"):
        explain(batch, SHAPE, H200, NO_PROFILES)
    with pytest.raises(InputError):
        explain(parse_tree("1,2/64,16"), ModelShape(q_heads=10, kv_heads=4, head_dim=128), H200, NO_PROFILES)


@pytest.mark.parametrize("stock", ["fa3", "flashinfer", "triton"])
def test_the_gain_is_over_a_stock_backend_by_the_profile(stock: str, tmp_path: Path, capsys: Capture) -> None:
    kernels = {"fa3": "fa3", "flashinfer": "flashinfer_tc", "triton": "triton_gqa"}
    profile = shipped_profile()
    packed, other = profile.cost("packed", "native"), profile.cost("stock", kernels[stock])
    option = () if stock == "fa3" else ("--stock", stock)  # fa3 is the default
    for case in [case for case in draw_set(32, 18) if case.shape.kv_bytes == 2 and case.shape.group >= 4]:
        step = StepFeatures.of(ForestFacts.of(case.forest()), case.lengths)
        policy = CostPolicy(packed, other, case.shape, profile.margin("native", kernels[stock]) / 100)
        explain_case(case, tmp_path, "--device", "h200", "--json", *option)
        gain = json.loads(capsys.readouterr().out)["gain"]
        assert (gain["stock"], gain["profile"]) == (kernels[stock], "shipped profile h200.json")
        ours, theirs = packed.microseconds(step, case.shape), other.microseconds(step, case.shape)
        assert (gain["packed_us"], gain["ratio"]) == (pytest.approx(ours), pytest.approx(theirs / ours))
        assert gain["route"] == policy.decide(step).route.value


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("a100", "no routing profile fits (NVIDIA A100-SXM4-80GB, heads 32/8/128, bf16, 16-bit KV, triton"),
        ("cpu", "no routing profile fits (cpu, "),
        ("h200 --query-len 8", "profiles know decode steps only"),
        ("h200 --kv-dtype fp32", "no routing profile fits (NVIDIA H200, "),
        ("h100", None),
        ("h200 --head-dim 64 --kv-dtype fp8", None),
    ],
)
def test_what_no_profile_knows_is_not_predicted(options, reason, capsys):
    assert main(["explain", "--tree", "1,64/4096,416", "--device", *options.split()]) == 0
    text = capsys.readouterr().out
    assert ("Predicted gain" in text) == (reason is None)
    assert reason is None or f"\nGain over the stock backend: not predicted, {reason}" in text
    rule = "the policy cost runs this step packed, by the conservative rule"
    assert (rule in text) == (reason is not None and "routing profile" in reason and "cpu" not in reason)


def test_a_profile_of_the_user_is_taken(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "sgl-prefix-attn/profiles"
    folder.mkdir(parents=True)
    mine = shipped_profile().model_copy(update={"machine": "NVIDIA A100-SXM4-80GB"})
    mine.save(folder / "mine.json")
    (folder / "broken.json").write_text("{", encoding="utf-8")
    assert main(["explain", "--tree", "1,64/4096,416", "--device", "a100"]) == 0
    captured = capsys.readouterr()
    assert f"by the user profile {folder / 'mine.json'}\n" in captured.out
    assert f"explain: {folder / 'broken.json'}: not a routing profile" in captured.err


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
