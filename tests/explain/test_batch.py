"""Batches of `explain`: a uniform tree in one word, or paths in a JSON file. Errors name the wrong value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.explain.batch import InputError, describe, parse_tree, read_batch_file


def batch_file(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "batch.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_a_tree_is_a_batch_of_requests() -> None:
    batch = parse_tree("1,3/4096,416")
    assert batch.paths == [[(0, 0, 4096)]] * 3
    assert batch.seq_lens.tolist() == [4512] * 3
    assert batch.is_decode
    assert parse_tree("4/128").paths == [[], [], [], []]
    extend = parse_tree("1,2/64,16", query_len=16)
    assert extend.query_lens.tolist() == [16, 16]
    assert not extend.is_decode


@pytest.mark.parametrize(
    ("tree", "query_len", "expected"),
    [
        ("1,10", 1, "expected NODES/TOKENS, for example 1,10/4096,416"),
        ("1,10/4096", 1, "2 levels of nodes but 1 of tokens"),
        ("1,x/4096,416", 1, "nodes: 'x' is not a positive whole number"),
        ("1,2/8,-8", 1, "tokens: '-8' is not a positive whole number"),
        ("4,2/8,8", 1, "a level of 2 nodes below 4: some would have no request"),
        ("1,100000/8,8", 1, "100000 requests; at most 65536 can be explained"),
        ("1,2/2147483647,1", 1, "seq_lens[0] is 2147483648; expected 1 to 2147483647"),
        ("1,2/64,16", 17, "17 query tokens a request, but its own tokens are 16"),
        ("1,2/64,16", 0, "query_lens[0] is 0; expected 1 to its seq_len, 80"),
    ],
)
def test_unusable_tree_or_query_length(tree: str, query_len: int, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_tree(tree, query_len)
    assert str(caught.value).startswith("tree ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ([], "content: Input should be a valid dictionary"),
        ({"paths": [[]]}, "seq_lens: Field required"),
        ({"paths": [[]], "seq_lens": [1], "seqlens": 1}, "seqlens: Extra inputs are not permitted"),
        ({"paths": [[[1, 0, "x"]]], "seq_lens": [1]}, "paths[0][0][2]: Input should be a valid integer"),
        ({"paths": "x", "seq_lens": "y"}, "(got 'x'); and 1 more"),
        ({"paths": [], "seq_lens": []}, "the batch has no requests"),
        ({"paths": [[]], "seq_lens": [1, 2]}, "2 seq_lens for 1 paths; one a request is expected"),
        ({"paths": [[]], "seq_lens": [-4]}, "seq_lens[0] is -4; expected 1 to 2147483647"),
        ({"paths": [[]], "seq_lens": [3], "query_lens": [4]}, "query_lens[0] is 4; expected 1 to its seq_len, 3"),
        ({"paths": [[[10**20, 0, 9]]], "seq_lens": [9]}, "paths[0][0][0]: Input should be less than 9223372036"),
        ({"paths": [[[1, 0, 9]]], "seq_lens": [8]}, "the path of request 0 ends at 9, beyond its seq_len 8"),
    ],
)
def test_unusable_batch_file(tmp_path: Path, content: Any, expected: str) -> None:
    name = batch_file(tmp_path, content)
    with pytest.raises(InputError) as caught:
        read_batch_file(name)
    assert str(caught.value).startswith(f"{name}: ")
    assert expected in str(caught.value)


def test_no_batch_file_and_too_many_requests(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the batch: No such file or directory"):
        read_batch_file(str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="70000 requests; at most 65536 can be explained"):
        describe("many", [[] for _ in range(70_000)], [1] * 70_000)
