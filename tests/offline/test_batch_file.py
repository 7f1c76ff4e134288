"""Each bad line of a batch file has its clear error, with its number, and touches no other line."""

from __future__ import annotations

import codecs
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


def with_content(content: object, role: str = "user", **values: object) -> dict:
    return with_body(CHAT, messages=[{"role": role, "content": content, **values}])


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
    (with_body(GOOD, max_token=3), "unknown_field", "body.max_token is an unknown field; did you mean max_tokens?"),
    (with_body(GOOD, best_of=3), "unknown_field", "body.best_of is an unknown field"),
    (with_body(GOOD, prompt=[]), "invalid_request", "body.prompt"),
    (with_body(GOOD, prompt=[1, -1]), "invalid_request", "body.prompt.1 = -1"),
    (with_body(GOOD, prompt=[True]), "invalid_request", "body.prompt.0 = True"),
    (with_body(GOOD, prompt=[[1], [2]]), "invalid_request", "body.prompt.0 = [1]"),
    (with_body(GOOD, prompt=None), "invalid_request", "body.prompt = None"),
    (with_body(GOOD, max_tokens=0), "invalid_request", "body.max_tokens = 0"),
    (with_body(GOOD, temperature=3), "invalid_request", "body.temperature = 3"),
    (with_body(GOOD, n=0), "invalid_request", "body.n = 0"),
    (with_body(GOOD, n="3"), "invalid_request", "body.n = '3'"),
    (with_body(GOOD, max_tokens=2**31), "invalid_request", "body.max_tokens = 2147483648"),
    (with_body(GOOD, min_tokens=2**31), "invalid_request", "body.min_tokens = 2147483648"),
    (with_body(GOOD, seed=2**63), "invalid_request", "body.seed = 9223372036854775808"),
    (with_body(GOOD, top_k=2**31), "invalid_request", "body.top_k = 2147483648"),
    (with_body(GOOD, stop_token_ids=[2**31]), "invalid_request", "body.stop_token_ids.0 = 2147483648"),
    (with_body(GOOD, temperature="0.5"), "invalid_request", "body.temperature = '0.5'"),
    (with_body(GOOD, logit_bias={"5": 1e308}), "invalid_request", "body.logit_bias = 1e+308"),
    (with_body(GOOD, logit_bias={"5": 101}), "invalid_request", "body.logit_bias = 101"),
    (with_body(GOOD, repetition_penalty=1e-39), "invalid_request", "body.repetition_penalty = 1e-39"),
    (with_body(GOOD, ignore_eos="yes"), "invalid_request", "body.ignore_eos = 'yes'"),
    (with_body(GOOD, stream=True), "invalid_request", "body.stream = True"),
    (with_body(GOOD, logprobs=5), "invalid_request", "body.logprobs = 5"),
    (with_body(CHAT, messages=[{"role": "user"}]), "invalid_request", "messages[0] needs a role and a content"),
    (with_content(None), "invalid_request", "messages[0].content = None: expected text, or a list of parts of text"),
    (
        with_content([{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "u"}}]),
        "invalid_request",
        "messages[0].content[1] is 'image_url'; only parts with the type 'text' can run offline",
    ),
    (with_content(["hello"]), "invalid_request", "messages[0].content[0] is 'hello'; only parts with the type 'text'"),
    (with_content([{"type": "text"}]), "invalid_request", "messages[0].content[0].text = None: expected text"),
    (with_content(None, role="assistant"), "invalid_request", "messages[0].content = None"),
    (with_content(None, tool_calls=[{"id": "a"}]), "invalid_request", "messages[0].content = None"),
    (with_body(CHAT, prompt="x"), "unknown_field", "body.prompt is an unknown field"),
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
    [with_body(GOOD, prompt="NESTED"), changed(GOOD, body="NESTED"), with_content("NESTED")],
    ids=["prompt", "body", "content"],
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


def test_sampling_parameters_have_sglangs_names():
    body = parsed(with_body(GOOD, n=2, min_tokens=3, seed=5, top_k=9, logit_bias={"5": 1})).body
    sampling = body.sampling()
    expected = {"n": 2, "min_new_tokens": 3, "sampling_seed": 5, "top_k": 9, "logit_bias": {"5": 1.0}}
    assert expected.items() <= sampling.items()
    assert body.limit == 4
    assert "max_new_tokens" not in sampling  # a matter of the room there is


def test_an_assistants_message_with_tool_calls_needs_no_content():
    entry = with_content(None, role="assistant", tool_calls=[{"id": "a"}])
    assert parsed(entry).body.messages == entry["body"]["messages"]


@pytest.mark.parametrize("entry", [GOOD, CHAT])
def test_null_is_as_good_as_no_field(entry):
    fields = type(parsed(entry).body).model_fields
    required = {name: value for name, value in entry["body"].items() if fields[name].is_required()}
    nulls = {name: None for name, field in fields.items() if not field.is_required()}
    assert {"temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "min_tokens"} <= set(nulls)
    assert parsed({**entry, "body": {**required, **nulls}}).body == parsed({**entry, "body": required}).body


def test_the_error_of_a_line_is_short_whatever_is_wrong_with_it():
    found = parse_line(1, json.dumps(with_body(GOOD, prompt=[5, *[-100] * 2000])).encode())
    assert isinstance(found, LineError)
    assert "body.prompt.1 = -100" in found.message
    assert "prompt.str" not in found.message  # an alternative, not a field
    assert "; and 1996 more" in found.message
    many = parse_line(1, json.dumps(with_body(GOOD, **{f"{n}" * 100_000: 1 for n in range(9)})).encode())
    assert isinstance(many, LineError)
    assert max(len(found.message), len(many.message)) < 2000


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(codecs.BOM_UTF8 + json.dumps(GOOD).encode() + b"\n")
    (entry,) = read_batch(source)
    assert isinstance(entry, BatchRequest)


def test_limits():
    assert parsed(CHAT).body.limit == 7
    assert parsed(with_body(CHAT, max_completion_tokens=None)).body.limit is None
    assert parsed(with_body(GOOD, max_tokens=9)).body.limit == 9


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
    source = write(tmp_path / "in.jsonl", [with_body(GOOD, foo=1), GOOD])
    first, second = read_batch(source)
    assert isinstance(first, LineError)
    assert isinstance(second, BatchRequest)


def test_text_that_is_not_utf8_is_an_error_of_its_line(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"custom_id": "\xff"}\n' + json.dumps(GOOD).encode() + b"\n")
    first, second = read_batch(source)
    assert first.code == "malformed_json"
    assert isinstance(second, BatchRequest)
