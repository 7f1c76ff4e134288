"""Token ids of requests, by the model's own tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_prefix_attn.offline.batch_file import BatchRequest, ChatBody, LineError

# A folder with none of these has no tokenizer; a model name is looked up by transformers.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


class PromptEncoder:
    """Encodes prompts.

    Args:
        model: folder or name of the model.

    Raises:
        OSError, ValueError: transformers cannot load the tokenizer that is there.
    """

    def __init__(self, model: str) -> None:
        self._tokenizer = load_tokenizer(model)

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
                text = self._tokenizer.apply_chat_template(body.messages, tokenize=False, add_generation_prompt=True)
                tokens = list(self._tokenizer.encode(text, add_special_tokens=False))
            except Exception as error:  # a chat template is a program of the model's authors and can raise anything
                return self._error(request, f"the model's chat template cannot render the messages: {error}")
        return tokens if tokens else self._error(request, "the prompt has no tokens")

    @staticmethod
    def _error(request: BatchRequest, message: str) -> LineError:
        return LineError(request.line, "invalid_prompt", message, request.custom_id)


def load_tokenizer(model: str) -> Any | None:
    """The model's tokenizer, or None for a model folder without one."""
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
