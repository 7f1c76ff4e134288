"""Numbers of an explanation, and how they are printed and drawn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.explain.batch import InputError, describe, parse_tree
from sgl_prefix_attn.explain.prediction import Machine
from sgl_prefix_attn.explain.report import Explanation, explain
from sgl_prefix_attn.explain.text import render
from sgl_prefix_attn.routing.cost import CostModel
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.policy import CostPolicy
from sgl_prefix_attn.routing.profile import shipped_profile
from sgl_prefix_attn.routing.profile_store import ProfileStore, ServerFacts
from sgl_prefix_attn.workloads import Case, draw_set

SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
FACTS = ServerFacts("NVIDIA H200", "9.0", SHAPE, "bf16", "native", "fa3")
H200 = Machine(DeviceModel.gpu(132), FACTS)
CPU = Machine(DeviceModel.cpu(2), "not known")
NO_PROFILES = ProfileStore([], [])
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_profiles_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def explained(tree: str, machine: Machine = H200, query_len: int = 1) -> Explanation:
    return explain(parse_tree(tree, query_len), SHAPE, machine, NO_PROFILES)


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
    assert numbers["work_items"] == 11 + numbers["kv_splits"]
    assert numbers["partial_bytes"] == 2 * explanation.plan.num_partials * 32 * (128 * 4 + 4)
    assert len(numbers["worker_seconds"]) == 264
    assert (numbers["time"]["by"], numbers["gain"].keys()) == ("planner", {"none"})
    assert numbers["plan_seconds"] > 0


def test_nothing_shared_is_nothing_gained() -> None:
    explanation = explained("16/1024")
    assert explanation.plan.kv_tokens_packed == explanation.plan.kv_tokens_per_request
    assert explanation.shared_share == 0
    assert "Forest: nothing is shared\n  16 private tails of 1,024 tokens\n" in render(explanation, full=False)


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
    assert isinstance(packed, CostModel)
    assert isinstance(other, CostModel)
    option = () if stock == "fa3" else ("--stock", stock)  # fa3 is the default
    for case in [case for case in draw_set(32, 18) if case.shape.kv_bytes == 2 and case.shape.group >= 4]:
        step = StepFeatures.of(ForestFacts.of(case.forest()), case.lengths)
        policy = CostPolicy(packed, other, case.shape, profile.margin("native", kernels[stock]) / 100)
        explain_case(case, tmp_path, "--device", "h200", "--json", *option)
        told = json.loads(capsys.readouterr().out)
        gain = told["gain"]
        assert told["time"]["seconds"] == pytest.approx(gain["packed_us"] / 1e6)
        assert (gain["stock"], gain["profile"]) == (kernels[stock], "shipped profile h200.json")
        ours, theirs = packed.microseconds(step, case.shape), other.microseconds(step, case.shape)
        assert gain["ratio"] == pytest.approx(theirs / ours)
        assert gain["route"] == policy.decide(step).route.value


@pytest.mark.parametrize(
    ("options", "by", "reason"),
    [
        (
            "a100",
            "planner",
            "no routing profile fits (NVIDIA A100-SXM4-80GB, heads 32/8/128, bf16, 16-bit KV, triton",
        ),
        ("cpu", "planner", "no routing profile fits (cpu, "),
        ("h200 --workers 100", "planner", "profiles are of all 264 workers"),
        ("h200 --query-len 8", "planner", "profiles know decode steps only"),
        ("h200 --kv-dtype fp32", "planner", "no routing profile fits (NVIDIA H200, "),
        ("h100", "profile", None),
        ("h200 --head-dim 64 --kv-dtype fp8", "profile", None),
    ],
)
def test_what_no_profile_knows_is_not_predicted(options, by, reason, capsys):
    words = ["explain", "--tree", "1,64/4096,416", "--device", *options.split()]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert ("\nEstimated attention time of a layer: " in text) == (by == "planner")
    assert ("Predicted gain" in text) == (reason is None)
    assert reason is None or f"\nGain over the stock backend: not predicted, {reason}" in text
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["by"] == by
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


@pytest.fixture
def plot() -> ModuleType:
    pytest.importorskip("matplotlib")
    return importlib.import_module("sgl_prefix_attn.explain.plot")


@pytest.mark.parametrize(
    ("name", "magic", "tree", "query_len"),
    [
        ("tree.png", b"\x89PNG", "1,4,16/300,200,50", 1),
        ("tree.svg", b"<?xml", "3/100", 1),
        ("tree.pdf", b"%PDF", "1,3/100,60", 50),
    ],
)
def test_picture(plot: ModuleType, tmp_path: Path, name: str, magic: bytes, tree: str, query_len: int) -> None:
    plot.draw(explained(tree, CPU, query_len), str(tmp_path / name))
    content = (tmp_path / name).read_bytes()
    assert content.startswith(magic)
    assert len(content) > 4_000


def test_picture_in_a_folder_that_is_not_there(plot: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        plot.draw(explained("1,2/64,16"), str(tmp_path / "none/a.png"))
