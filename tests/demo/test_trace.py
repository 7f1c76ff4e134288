"""Traces: the shipped slice, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.trace import TraceError, read_trace

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (GOOD | {"timestamp": -1}, "timestamp"),
        (GOOD | {"timestamp": 4}, "timestamp 4 is before"),
        (GOOD | {"input_length": 0}, "input_length"),
        (GOOD | {"output_length": 1.5}, "output_length"),
        (GOOD | {"hash_ids": [7]}, "2 blocks of 512 tokens, but hash_ids has 1"),
        (GOOD | {"hash_ids": [7, -8]}, "hash_ids.1"),
        ({key: value for key, value in GOOD.items() if key != "hash_ids"}, "hash_ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, second: Any, says: str) -> None:
    path = write(tmp_path, json.dumps(GOOD), json.dumps(second))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert f"{path}, line 2: " in str(error.value)
    assert says in str(error.value)


def test_a_line_that_is_not_json_a_missing_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2"):
        read_trace(write(tmp_path, json.dumps(GOOD), "{"))
    with pytest.raises(TraceError, match=r"absent\.jsonl"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(write(tmp_path))
