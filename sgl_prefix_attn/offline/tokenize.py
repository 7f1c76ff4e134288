"""Token ids of requests, by the model's own tokenizer and chat template."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import orjson

from sgl_prefix_attn.offline.batch_file import BatchRequest, ChatBody, LineError

# A folder with none of these has no tokenizer; a model name is looked up by transformers.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


class PromptEncoder:
    """Encodes prompts.

    Args:
        model: folder or name of the model, or of its tokenizer.
        chat_template: a Jinja file with a chat template in place of the tokenizer's own.
        template_name: which one of several chat templates of the tokenizer; None: the first.
        loading: more arguments for `load_tokenizer`.

    Raises:
        OSError, ValueError: transformers cannot load the tokenizer that is there, or there is no such template.
    """

    def __init__(
        self, model: str, chat_template: str | None = None, template_name: str | None = None, **loading: Any
    ) -> None:
        self._tokenizer = tokenizer = load_tokenizer(model, **loading)
        if chat_template is not None:
            template = _read_template(chat_template)
            if tokenizer is None:
                raise ValueError(f"--chat-template {chat_template}: {model} has no tokenizer; leave the option away")
            tokenizer.chat_template = template
        elif tokenizer is not None and isinstance(templates := getattr(tokenizer, "chat_template", None), dict):
            if template_name is not None and template_name not in templates:
                raise ValueError(f"--hf-chat-template-name {template_name}: expected one of {', '.join(templates)}")
            tokenizer.chat_template = templates[template_name or next(iter(templates))]

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def encode(self, request: BatchRequest) -> list[int] | LineError:
        """The request's prompt as token ids, or why there is none."""
        body = request.body
        if not isinstance(body, ChatBody) and not isinstance(body.prompt, str):
            return body.prompt
        if self._tokenizer is None:
            return self._error(
                request, "the model has no tokenizer; only /v1/completions with token ids as the prompt can run"
            )
        if not isinstance(body, ChatBody):
            tokens = list(self._tokenizer.encode(body.prompt))
        else:
            try:
                messages = [_for_template(message) for message in body.messages]
            except ValueError as error:
                return self._error(request, str(error))
            try:
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                tokens = list(self._tokenizer.encode(text, add_special_tokens=False))
            except Exception as error:  # a chat template is a program of the model's authors and can raise anything
                return self._error(request, f"the model's chat template cannot render the messages: {error}")
        return tokens if tokens else self._error(request, "the prompt has no tokens")

    @staticmethod
    def _error(request: BatchRequest, message: str) -> LineError:
        return LineError(request.line, "invalid_prompt", message, request.custom_id)


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as SGLang's server gives it to the chat template: no null, arguments of tool calls as objects.

    Raises:
        ValueError: the arguments of a tool call are text, but not of a JSON object.
    """
    filled = {**message, "content": message["content"] or ""}
    kept = {name: value for name, value in filled.items() if value is not None}
    calls = kept.get("tool_calls")
    if message["role"] == "assistant" and isinstance(calls, list):
        kept["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return kept


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"function.arguments of a tool call = {reprlib.repr(text)}: expected a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _read_template(path: str) -> str:
    """A file of --chat-template, as SGLang reads it."""
    if not path.endswith(".jinja") or not Path(path).is_file():
        raise ValueError(
            f"--chat-template {path}: no file that ends with .jinja; prompts are rendered by Jinja templates only, not "
            "by SGLang's conversation templates. Write the template to such a file, or leave the option away"
        )
    return Path(path).read_text(encoding="utf-8").strip("\n").replace("\\n", "\n")


def load_tokenizer(model: str, **loading: Any) -> Any | None:
    """The model's tokenizer, or None for a model folder without one.

    Args:
        loading: arguments for transformers.
    """
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, **loading)
