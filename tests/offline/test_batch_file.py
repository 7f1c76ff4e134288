"""Each bad line of a batch file has its clear error, with its number, and touches no other line."""

from __future__ import annotations

import codecs
import gzip
import json

import pytest

from sgl_prefix_attn.offline.answers import failure
from sgl_prefix_attn.offline.batch_file import BatchRequest, LineError, parse_line, read_batch
from tests.offline.batches import line, write

CHAT = {
    "custom_id": "c", "method": "POST", "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 7},
}  # fmt: skip


def changed(entry: dict, **values: object) -> dict:
    return {**entry, **values}


def with_body(entry: dict, **values: object) -> dict:
    return {**entry, "body": {**entry["body"], **values}}


def without(entry: dict, name: str) -> dict:
    return {key: value for key, value in entry.items() if key != name}


def parsed(entry: dict, number: int = 1) -> BatchRequest:
    found = parse_line(number, json.dumps(entry).encode())
    assert isinstance(found, BatchRequest)
    return found


GOOD = line(1, [1, 2, 3])

BAD = [
    ("{", "malformed_json", "not JSON"),
    ('"x"', "malformed_json", "a JSON str, expected an object"),
    ('{"custom_id": "a", "custom_id": "b"}', "duplicate_key", "an object has the key 'custom_id' twice"),
    (json.dumps(CHAT).replace('"role"', '"content": "x", "role"'), "duplicate_key", "the key 'content' twice"),
    (json.dumps(GOOD).replace('"prompt"', r'"promp\u0074": [7], "prompt"'), "duplicate_key", "the key 'prompt' twice"),
    (json.dumps(CHAT)[:-2] + ', "messages": ' + "[" * 1000 + "]" * 1000 + "}}", "malformed_json", "too deeply"),
    (without(GOOD, "custom_id"), "invalid_request", "custom_id is missing"),
    (changed(GOOD, custom_id=""), "invalid_request", "custom_id = ''"),
    (changed(GOOD, method="GET"), "invalid_request", "method = 'GET'"),
    (changed(GOOD, url="/v1/embeddings"), "invalid_request", "url = '/v1/embeddings'"),
    (changed(GOOD, customid="x"), "unknown_field", "customid is an unknown field; did you mean custom_id?"),
    (without(GOOD, "body"), "invalid_request", "body is missing"),
    (changed(GOOD, body=[]), "invalid_request", "body = []"),
]


@pytest.mark.parametrize(("entry", "code", "message"), BAD)
def test_errors_are_clear(entry, code, message):
    text = entry if isinstance(entry, str) else json.dumps(entry)
    found = parse_line(12, text.encode())
    assert isinstance(found, LineError)
    assert found.code == code
    assert message in found.message
    assert failure(found)["error"]["message"].startswith("line 12: ")


@pytest.mark.parametrize(
    "entry",
    [changed(GOOD, body="NESTED"), changed(GOOD, url="NESTED")],
    ids=["body", "url"],
)
def test_values_nested_deeper_than_they_can_be_printed_are_errors_of_their_line(entry):
    found = parse_line(3, json.dumps(entry).replace('"NESTED"', "[" * 1000 + "]" * 1000).encode())
    assert isinstance(found, LineError)
    assert (found.code, found.custom_id) == ("invalid_request", entry["custom_id"])
    assert "[[[" in found.message


@pytest.mark.parametrize("entry", [GOOD, CHAT, with_body(GOOD, prompt="text", stop=["a"], seed=3, stream=False)])
def test_good_lines_are_read(entry):
    found = parsed(entry, 5)
    assert (found.line, found.custom_id, found.url) == (5, entry["custom_id"], entry["url"])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(codecs.BOM_UTF8 + json.dumps(GOOD).encode() + b"\n")
    (entry,) = read_batch(source)
    assert isinstance(entry, BatchRequest)


def test_a_compressed_file_is_read_as_its_content(tmp_path):
    source = tmp_path / "in.jsonl"  # whatever it is called
    content = json.dumps(GOOD).encode() + b"\n{\n"
    source.write_bytes(gzip.compress(content))
    good, bad = read_batch(source)
    assert isinstance(good, BatchRequest)
    assert isinstance(bad, LineError)
    for damaged in (gzip.compress(content)[:-9], gzip.compress(content)[:-8] + b"\0" * 8, b"\x1f\x8bx"):
        source.write_bytes(damaged)
        with pytest.raises(OSError):  # noqa: PT011 - the messages are Python's
            list(read_batch(source))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_text_in_another_encoding_is_told_once(tmp_path, encoding):
    source = tmp_path / "in.jsonl"
    source.write_bytes("".join(json.dumps(line(n, [1])) + "\n" for n in range(9)).encode(encoding))
    with pytest.raises(ValueError, match=r"in\.jsonl: UTF-16 or UTF-32 text; write it as UTF-8"):
        list(read_batch(source))


def test_a_duplicate_custom_id_is_the_later_lines_error(tmp_path):
    source = write(
        tmp_path / "in.jsonl", [GOOD, "", line(2, [4]), changed(line(3, [5]), custom_id="request-1"), line(4, [6])]
    )
    entries = list(read_batch(source))
    assert [type(entry) for entry in entries] == [BatchRequest, BatchRequest, LineError, BatchRequest]
    assert entries[2].line == 4
    assert entries[2].code == "duplicate_custom_id"
    assert entries[2].message == "custom_id 'request-1' is that of line 1 already; each needs its own"


def test_a_bad_line_does_not_claim_its_custom_id(tmp_path):
    source = write(tmp_path / "in.jsonl", [changed(GOOD, foo=1), GOOD])
    first, second = read_batch(source)
    assert isinstance(first, LineError)
    assert isinstance(second, BatchRequest)


def test_text_that_is_not_utf8_is_an_error_of_its_line(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"custom_id": "\xff"}\n' + json.dumps(GOOD).encode() + b"\n")
    first, second = read_batch(source)
    assert first.code == "malformed_json"
    assert isinstance(second, BatchRequest)
