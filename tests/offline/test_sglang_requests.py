"""What SGLang's request classes have against a body is told with the names of its fields, before anything loads."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefix_attn.offline.batch_file import CHAT, COMPLETIONS
from sgl_prefix_attn.offline.messages import Line, Refused
from sgl_prefix_attn.offline.sglang_requests import RefusedError, _check_numbers, check, request_of

pytest.importorskip("sglang")
HELLO = [{"role": "user", "content": "hello"}]


def line(url: str, **body: Any) -> Line:
    return Line(3, url, json.dumps({"custom_id": "x", "body": body}).encode())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (line(COMPLETIONS), "body.prompt is missing"),
        (line(COMPLETIONS, prompt=None), "body.prompt = None: Input should be a valid list"),
        (line(COMPLETIONS, prompt=[1], max_tokens=0), "body.max_tokens = 0: Value error, max_tokens must be positive"),
        (line(COMPLETIONS, prompt=[1], n="many"), "body.n = 'many': Input should be a valid integer"),
        (line(COMPLETIONS, prompt="x", stream=True), "body.stream: a batch file has whole answers; leave it away"),
        (line(COMPLETIONS, prompt="x", n=4097), "body.n = 4097: expected at most 4096"),
        (line(CHAT, messages=HELLO, n=10**9), "body.n = 1000000000: expected at most 4096"),
        (line(CHAT), "body.messages is missing"),
        (line(CHAT, messages=[{"role": "user", "content": 5}]), "body.messages.0.content = 5"),
        (line(CHAT, messages=[{"role": "nobody", "content": ""}]), "body.messages.0.role = 'nobody'"),
        (line(CHAT, messages=HELLO, tools=[{"function": {}}]), "body.tools.0.function.name is missing"),
        (line(CHAT, messages=HELLO, response_format="json"), "body: AttributeError"),
    ],
)
def test_errors_are_clear(found, message):
    (refused,) = check([found]).refused
    assert isinstance(refused, Refused)
    assert (refused.number, refused.code) == (3, "invalid_request")
    assert message in refused.message


@pytest.mark.parametrize(
    "found",
    [
        line(COMPLETIONS, prompt=["a", "b"], logprobs=0, echo=True),
        line(COMPLETIONS, prompt="x", n=-1),
        line(COMPLETIONS, prompt=[[1], [2]], temperature="0.5", model="m:adapter"),
        line(CHAT, messages=HELLO, tools=None, response_format=None, stop=None, seed=None, reasoning={"effort": "low"}),
        line(CHAT, messages=[{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]),
        line(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}], stream=False),
    ],
)
def test_what_sglang_takes_is_taken(found):
    checked = check([found])
    assert (list(checked.refused), checked.ignored) == ([], {})
    assert request_of(found) is not None


def test_fields_that_sglang_does_not_know_are_told_with_how_often_they_come():
    lines = [line(COMPLETIONS, prompt="x", max_token=3), line(COMPLETIONS, prompt="x", max_token=4, zzz=1)]
    assert check(lines).ignored == {"'max_token' (did you mean max_tokens?)": 2, "'zzz'": 1}


def test_the_error_of_a_line_is_short_whatever_is_wrong_with_it():
    (refused,) = check([line(COMPLETIONS, prompt=[5, *[None] * 2000])]).refused
    assert "more" in refused.message
    assert len(refused.message) < 2000


@pytest.mark.parametrize("field", ["prompt", "stop", "custom_params"])
def test_values_nested_deeper_than_they_can_be_printed(field):
    text = json.dumps({"body": {"prompt": "x", field: "NESTED"}}).replace('"NESTED"', "[" * 1000 + "]" * 1000)
    (refused,) = check([Line(3, COMPLETIONS, text.encode())]).refused
    assert "[[[" in refused.message


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_new_tokens": 2**31}, "max_tokens = 2147483648: expected 0 to 2147483647"),
        ({"top_k": 2**31}, "top_k = 2147483648"),
        ({"temperature": 1e300}, "temperature = 1e[+]300"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias = nan"),
        ({"stop_token_ids": [900]}, "stop_token_ids has the token id 900; those of the model are from 0 to 899"),
        ({"min_new_tokens": 2, "regex": "a"}, "min_tokens with a grammar can end SGLang's scheduler"),
        ({"min_new_tokens": 2, "ebnf": 'root ::= "a"'}, "min_tokens with a grammar"),
        ({"min_new_tokens": 2, "json_schema": "{}"}, "min_tokens with a grammar"),
    ],
)
def test_what_would_end_the_scheduler_is_refused(sampling, message):
    from sglang.srt.sampling.sampling_params import SamplingParams

    plain = {"max_new_tokens": 8, **sampling}
    with pytest.raises(RefusedError, match=message):
        _check_numbers(SimpleNamespace(input_ids=[1], sampling_params=SamplingParams(**plain), top_logprobs_num=0), 900)
