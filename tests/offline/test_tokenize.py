"""Prompts become token ids by the model's own tokenizer and chat template."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sgl_prefix_attn.offline import cli
from sgl_prefix_attn.offline.batch_file import LineError, parse_line
from sgl_prefix_attn.offline.tokenize import PromptEncoder
from tests.offline import batches

WORDS = {word: number for number, word in enumerate(["<unk>", "<user>", "<assistant>", "hello", "world", "again"])}
TEMPLATE = (
    "{% if messages[0].content != 'vanish' %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% endif %}"
)


def save_tokenizer(folder: Path, template: str | dict[str, str] | None) -> str:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template).save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> PromptEncoder:
    return PromptEncoder(save_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATE))


def message(content: object, role: str = "user") -> dict[str, object]:
    return {"role": role, "content": content}


def request(url: str, **body: object):
    return parse_line(3, json.dumps({"custom_id": "x", "url": url, "body": body}).encode())


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hello world"}, [3, 4]),
        ({"prompt": [9, 8, 7]}, [9, 8, 7]),
        ({"messages": [message("hello"), message("world", "assistant")]}, [1, 3, 2, 4, 2]),
        ({"messages": [message([{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}])]}, [1, 3, 4, 2]),
    ],
    ids=["text", "token ids", "messages with the generation prompt", "parts of text"],
)
def test_prompts_become_token_ids(encoder, body, tokens):
    assert encoder.has_tokenizer
    url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    assert encoder.encode(request(url, **body)) == tokens


def calls(*arguments: object) -> list[dict[str, object]]:
    """A chat with one tool call for each of the arguments."""
    called = [{"id": "c", "type": "function", "function": {"name": "world", "arguments": a}} for a in arguments]
    return [
        {"role": "user", "content": "hello", "name": None},
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": "c", "content": "again"},
    ]


def test_tool_calls_are_rendered_as_by_sglangs_server(tmp_path):
    serving = pytest.importorskip("sglang.srt.entrypoints.openai.serving_chat")
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    encoder = PromptEncoder(save_tokenizer(tmp_path, template))
    rendered = []
    encoder._tokenizer.encode = lambda text, **_: rendered.append(text) or [1]
    messages = calls('{"city": "Rome"}', {"city": "Paris"})
    assert encoder.encode(request("/v1/chat/completions", messages=messages)) == [1]
    given = []
    for entry in messages:
        serving.normalize_assistant_tool_call_arguments(entry)
        entry["content"] = entry["content"] or ""
        given.append(serving.process_content_for_template_format(entry, "string", [], [], [], []))
    assert rendered == [encoder._tokenizer.apply_chat_template(given, tokenize=False)]
    assert "Rome" in rendered[0]
    assert "null" not in rendered[0]


@pytest.mark.parametrize("arguments", ["{", "[1]", ""])
def test_arguments_of_a_tool_call_that_are_no_object_are_an_error_of_the_line(encoder, arguments):
    error = encoder.encode(request("/v1/chat/completions", messages=calls(arguments)))
    assert isinstance(error, LineError)
    assert f"function.arguments of a tool call = {arguments!r}: expected a JSON object" in error.message


def test_a_template_that_refuses_is_an_error_of_the_line(encoder):
    error = encoder.encode(request("/v1/chat/completions", messages=[{"role": "user", "content": "refuse"}]))
    assert isinstance(error, LineError)
    assert (error.line, error.custom_id, error.code) == (3, "x", "invalid_prompt")
    assert "not this" in error.message


def test_without_a_tokenizer_only_token_ids(tmp_path):
    encoder = PromptEncoder(str(tmp_path))
    assert not encoder.has_tokenizer
    assert encoder.encode(request("/v1/completions", prompt=[1, 2])) == [1, 2]
    for entry in (
        request("/v1/completions", prompt="hello"),
        request("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]),
    ):
        assert "the model has no tokenizer" in encoder.encode(entry).message


def chat_tokens(encoder: PromptEncoder) -> list[int]:
    return encoder.encode(request("/v1/chat/completions", messages=[message("hello")]))


@pytest.mark.parametrize("own", [None, TEMPLATE])
def test_a_chat_template_of_a_file_goes_before_the_models_own(tmp_path, own):
    folder, template = save_tokenizer(tmp_path / "model", own), tmp_path / "other.jinja"
    template.write_text("\n{% for m in messages %}{{ m.content }}\\nagain{% endfor %}\n")
    assert chat_tokens(PromptEncoder(folder, str(template))) == [3, 5]


@pytest.mark.parametrize("name", ["chatml", "none.jinja", "template.json"])
def test_templates_that_are_no_jinja_file_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for other in ("chatml", "template.json"):
        (tmp_path / other).touch()
    with pytest.raises(
        ValueError, match=rf"--chat-template {name}: no file that ends with .jinja; .* leave the option"
    ):
        PromptEncoder(save_tokenizer(tmp_path / "model", TEMPLATE), name)


def test_a_chat_template_needs_a_tokenizer(tmp_path):
    template = tmp_path / "a.jinja"
    template.write_text(TEMPLATE)
    with pytest.raises(ValueError, match="has no tokenizer; leave the option away"):
        PromptEncoder(str(tmp_path), str(template))


def test_one_of_several_chat_templates_is_chosen_by_name(tmp_path):
    folder = save_tokenizer(tmp_path, {"default": "hello", "second": "world"})
    assert chat_tokens(PromptEncoder(folder)) == [3]
    assert chat_tokens(PromptEncoder(folder, template_name="second")) == [4]
    with pytest.raises(ValueError, match="--hf-chat-template-name third: expected one of default, second"):
        PromptEncoder(folder, template_name="third")


def encoder_for(folder: Path, model: Path, text: str) -> PromptEncoder:
    """The encoder of a batch command with these server arguments."""
    source = batches.write(folder / "in.jsonl", [])
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    arguments = [str(source), str(folder / "out"), "--model", str(model), "--device", "cpu", f"--server-args={text}"]
    return cli._encoder(cli._options(parser.parse_args(arguments), folder))


def test_the_tokenizer_is_that_of_the_server_arguments(tmp_path):
    weights, template = tmp_path / "weights", tmp_path / "other.jinja"
    weights.mkdir()
    template.write_text("world")
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    assert not encoder_for(tmp_path, weights, "").has_tokenizer
    encoder = encoder_for(tmp_path, weights, f"--tokenizer-path {folder} --chat-template={template}")
    assert chat_tokens(encoder) == [4]
    with pytest.raises(cli.UsageError, match=r"--chat-template chatml: no file that ends with \.jinja"):
        encoder_for(tmp_path, weights, f"--tokenizer-path {folder} --chat-template chatml")


TOKENIZER_WITH_CODE = """
from transformers import PreTrainedTokenizer

class Letters(PreTrainedTokenizer):
    vocab_size = 256
    def get_vocab(self): return {chr(number): number for number in range(256)}
    def _tokenize(self, text, **_): return list(text)
    def _convert_token_to_id(self, token): return ord(token)
    def _convert_id_to_token(self, number): return chr(number)
"""


def test_a_tokenizer_that_is_code_is_loaded_if_its_code_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "letters.py").write_text(TOKENIZER_WITH_CODE)
    entries = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["letters.Letters", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(entries))
    (model / "config.json").write_text('{"model_type": "llama"}')
    encoder = encoder_for(tmp_path, model, "--trust-remote-code")
    assert encoder.encode(request("/v1/completions", prompt="hi")) == [104, 105]
    with pytest.raises(cli.UsageError, match="trust_remote_code"):
        encoder_for(tmp_path, model, "")
