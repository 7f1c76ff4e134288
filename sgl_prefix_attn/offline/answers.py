"""Lines of the output and of the errors file, in OpenAI's batch format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.offline.batch_file import CHAT, BatchRequest, LineError


@dataclass(frozen=True)
class Choice:
    """One continuation. `text` is None when the model has no tokenizer; `finish` is SGLang's finish reason."""

    tokens: tuple[int, ...]
    text: str | None
    finish: str


@dataclass(frozen=True)
class Answer:
    """The result of a request. `cached_tokens`: prompt tokens that the first choice found in the cache."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)


def success(request: BatchRequest, answer: Answer, model: str, created: int) -> dict[str, Any]:
    """The output line of a request that succeeded. `token_ids` is an addition to OpenAI's format."""
    chat = request.url == CHAT
    choices: list[dict[str, Any]] = []
    for index, choice in enumerate(answer.choices):
        text = choice.text or ""
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices.append(
            {
                "index": index,
                **content,
                "token_ids": list(choice.tokens),
                "logprobs": None,
                "finish_reason": choice.finish,
            }
        )
    identity = f"batch_req_{request.line}"
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.line}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": request.body.model or model,
        "choices": choices,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.output_tokens,
            "total_tokens": answer.prompt_tokens + answer.output_tokens,
        },
    }
    response = {"status_code": 200, "request_id": identity, "body": body}
    return {"id": identity, "custom_id": request.custom_id, "response": response, "error": None}


def failure(error: LineError) -> dict[str, Any]:
    """The line of the errors file. `line` is an addition to OpenAI's format."""
    return {
        "id": f"batch_req_{error.line}",
        "custom_id": error.custom_id,
        "line": error.line,
        "response": None,
        "error": {"code": error.code, "message": f"line {error.line}: {error.message}"},
    }
