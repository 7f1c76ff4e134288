"""A window of a Mooncake trace becomes one batch: requests share the 512-token blocks on which their hash ids agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.explain.batch import BatchDescription, InputError
from sgl_prefix_attn.explain.trace import read_window


def line(input_length: Any, hash_ids: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": input_length, "output_length": 10, "hash_ids": hash_ids})


def window(tmp_path: Path, lines: list[str], where: str = "0:2", progress: float = 0.5) -> BatchDescription:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_window(str(path), where, progress)


def test_shared_blocks_have_one_node(tmp_path: Path) -> None:
    batch = window(tmp_path, [line(1100, [5, 6, 7]), line(1030, [5, 6, 9])])
    first, second = batch.paths
    assert [(begin, end) for _, begin, end in first] == [(0, 512), (512, 1024), (1024, 1100)]
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_a_window_selects_by_order_and_reads_no_further(tmp_path: Path) -> None:
    batch = window(tmp_path, [line(1, [0]), line(2, [0]), line(3, [0]), "garbage"], "1:2", 0.0)
    assert batch.seq_lens.tolist() == [3, 4]
    assert batch.title.endswith("trace.jsonl requests 1 to 2")


BAD_LINE = r"trace.jsonl, line 2: input_length 513 is 2 blocks of 512 tokens, but hash_ids has 1"


@pytest.mark.parametrize(
    ("second_line", "where", "progress", "expected"),
    [
        (513, "0:2", 0.5, BAD_LINE),
        (5, "1:3", 0.5, "window 1:3 ends at request 4; the file has 2"),
        (5, "0:1", 1.5, r"progress 1.5: expected a share from 0 to 1"),
        *[(5, where, 0.5, "expected START:COUNT, for example 0:64") for where in ("5", "a:b", "1:0", "-1:2", ":")],
        *[(5, where, 0.5, "expected START:COUNT, for example 0:64") for where in ("1:-2", "0:2.5")],
    ],
)
def test_unusable_window(tmp_path: Path, second_line: int, where: str, progress: float, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        window(tmp_path, [line(5, [1]), line(second_line, [1])], where, progress)
