"""Numbers of an explanation, and how they are printed and drawn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.explain.batch import InputError, describe, parse_tree
from sgl_prefix_attn.explain.report import Explanation, explain
from sgl_prefix_attn.explain.text import render

SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
H200 = DeviceModel.gpu(132)


def explained(tree: str, device: DeviceModel = H200, query_len: int = 1) -> Explanation:
    return explain(parse_tree(tree, query_len), SHAPE, device)


def test_reads_of_one_shared_prompt() -> None:
    explanation = explained("1,10/4096,416")
    numbers = json.loads(json.dumps(explanation.to_json()))
    assert numbers["kv_tokens"] == {"packed": 8256, "per_request": 45120, "limit": 8256}
    assert numbers["kv_bytes"]["packed"] == 8256 * 2 * 8 * 128 * 2
    assert explanation.shared_share == pytest.approx(4096 / 4512)
    assert numbers["work_items"] == 11 + numbers["kv_splits"]
    assert numbers["partial_bytes"] == 2 * explanation.plan.num_slots * 32 * (128 * 4 + 4)
    assert len(numbers["worker_seconds"]) == 264
    assert numbers["predicted_speedup"] > 2
    assert numbers["plan_seconds"] > 0


def test_nothing_shared_is_nothing_gained() -> None:
    explanation = explained("16/1024")
    assert explanation.predicted_speedup == pytest.approx(1.0)
    assert explanation.shared_share == 0
    assert "Forest: nothing is shared\n  16 private tails of 1,024 tokens\n" in render(explanation, full=False)


def test_unusable_batch_and_shape() -> None:
    batch = describe("mine", [[(1, 0, 8)], [(1, 0, 9)]], [10, 10])
    with pytest.raises(InputError, match=r"^mine: request 1, segment 0 .* another request has this node"):
        explain(batch, SHAPE, H200)
    with pytest.raises(InputError):
        explain(parse_tree("1,2/64,16"), ModelShape(q_heads=10, kv_heads=4, head_dim=128), H200)


def test_many_different_nodes_are_cut_short_with_their_count() -> None:
    paths, seq_lens = [], []
    for node in range(20):
        paths += [[(node, 0, 100 + node)]] * 2
        seq_lens += [200, 200]
    explanation = explain(describe("different", paths, seq_lens), SHAPE, H200)
    short = render(explanation, full=False)
    assert "... 12 more nodes here, read by 24 requests" in short
    assert "... " not in render(explanation, full=True)


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
    plot.draw(explained(tree, DeviceModel.cpu(2), query_len), str(tmp_path / name))
    content = (tmp_path / name).read_bytes()
    assert content.startswith(magic)
    assert len(content) > 4_000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tree.bmp", r"expected a file name that ends in \.png, \.svg, \.pdf"),
        ("none/a.png", "No such file"),
    ],
)
def test_picture_with_an_unusable_name(plot: ModuleType, tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        plot.draw(explained("1,2/64,16"), str(tmp_path / name))
