"""Prompts become token ids by the model's own tokenizer and chat template."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sgl_prefix_attn.offline.batch_file import LineError, parse_line
from sgl_prefix_attn.offline.tokenize import PromptEncoder

WORDS = {word: number for number, word in enumerate(["<unk>", "<user>", "<assistant>", "hello", "world", "again"])}
TEMPLATE = (
    "{% if messages[0].content != 'vanish' %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return PromptEncoder(str(folder))


def request(url: str, **body: object):
    return parse_line(3, json.dumps({"custom_id": "x", "url": url, "body": body}).encode())


def test_text_of_a_completion(encoder):
    assert encoder.has_tokenizer
    assert encoder.encode(request("/v1/completions", prompt="hello world")) == [3, 4]


def test_token_ids_of_a_completion_stay(encoder):
    assert encoder.encode(request("/v1/completions", prompt=[9, 8, 7])) == [9, 8, 7]


def test_messages_are_rendered_with_the_generation_prompt(encoder):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    assert encoder.encode(request("/v1/chat/completions", messages=messages)) == [1, 3, 2, 4, 2]


def test_content_in_parts_is_their_text(encoder):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    messages = [{"role": "user", "content": parts}]
    assert encoder.encode(request("/v1/chat/completions", messages=messages)) == [1, 3, 4, 2]


def test_a_template_that_refuses_is_an_error_of_the_line(encoder):
    error = encoder.encode(request("/v1/chat/completions", messages=[{"role": "user", "content": "refuse"}]))
    assert isinstance(error, LineError)
    assert (error.line, error.custom_id, error.code) == (3, "x", "invalid_prompt")
    assert "not this" in error.message


def test_a_prompt_without_tokens_is_an_error(encoder):
    for entry in (
        request("/v1/completions", prompt=""),
        request("/v1/chat/completions", messages=[{"role": "user", "content": "vanish"}]),
    ):
        error = encoder.encode(entry)
        assert isinstance(error, LineError)
        assert error.message == "the prompt has no tokens"


def test_without_a_tokenizer_only_token_ids(tmp_path):
    encoder = PromptEncoder(str(tmp_path))
    assert not encoder.has_tokenizer
    assert encoder.encode(request("/v1/completions", prompt=[1, 2])) == [1, 2]
    for entry in (
        request("/v1/completions", prompt="hello"),
        request("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]),
    ):
        assert "the model has no tokenizer" in encoder.encode(entry).message
