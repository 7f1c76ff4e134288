"""Lines of the output and of the errors file, in OpenAI's batch format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.offline.batch_file import BatchRequest, LineError


@dataclass(frozen=True)
class Answer:
    """The result of a request.

    Attributes:
        body: SGLang's response object.
        prompt_tokens, output_tokens: as it counts them.
        cached_tokens: prompt tokens that were found in the cache.
    """

    body: dict[str, Any]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


def success(request: BatchRequest, answer: Answer) -> dict[str, Any]:
    """The output line of a request that succeeded."""
    identity = f"batch_req_{request.line}"
    response = {"status_code": 200, "request_id": identity, "body": answer.body}
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
