"""What a request means, in the engine's process: SGLang's own request classes and handlers say so, as in its server."""

from __future__ import annotations

import asyncio
import collections
import copy
import difflib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from sgl_prefix_attn.offline.answers import Answer
from sgl_prefix_attn.offline.batch_file import CHAT, COMPLETIONS, problems_of, shortened
from sgl_prefix_attn.offline.messages import Checked, Line, Planned, Refused, Task
from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER

_INVALID = "invalid_request"
# SGLang's scheduler ends with all its requests where a number does not fit its tensors.
_INT32_MAX, _INT64_MAX, _FLOAT32_MAX = 2**31 - 1, 2**63 - 1, 3e38
_MOST_BIAS = 1e20  # divided by the least temperature and the least penalty it is still finite
_LEAST_PENALTY = 1e-6  # divisor of logits
_MOST_SAMPLES = 4096
_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")  # of SGLang's sampling parameters
# Fields that SGLang's validators read before its classes drop them.
_READ_BY_VALIDATORS = frozenset({"reasoning", "data_parallel_rank"})


class RefusedError(Exception):
    """SGLang's server would refuse the request, or end it without an answer; says why."""


def request_of(line: Line | Task) -> Any:
    """SGLang's request object. Raises what its class raises."""
    return _class_of(line.url).model_validate(_body(line))


def _body(line: Line | Task) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(line.text)["body"]
    return body


def _class_of(url: str) -> type[BaseModel]:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    kinds: dict[str, type[BaseModel]] = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}
    return kinds[url]


def check(lines: Sequence[Line]) -> Checked:
    """What SGLang's classes have against the bodies; needs no model and no tokenizer."""
    refused, ignored = [], collections.Counter[str]()
    for line in lines:
        try:
            request = request_of(line)
        except ValidationError as error:
            refused.append(Refused(line.number, _INVALID, problems_of(error, "body.")))
            continue
        except Exception as error:  # SGLang's validators take some values for what they are not
            refused.append(Refused(line.number, _INVALID, f"body: {reason(error)}"))
            continue
        if request.stream:
            refused.append(Refused(line.number, _INVALID, "body.stream: a batch file has whole answers; leave it away"))
            continue
        if request.n > _MOST_SAMPLES:  # SGLang copies the prompt so many times
            refused.append(Refused(line.number, _INVALID, f"body.n = {request.n}: expected at most {_MOST_SAMPLES}"))
            continue
        fields = type(request).model_fields
        ignored.update(
            _unknown(name, list(fields))
            for name in _body(line)
            if name not in fields and name not in _READ_BY_VALIDATORS
        )
    return Checked(refused, dict(ignored))


def _unknown(name: str, fields: list[str]) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    return shortened(name) + (f" (did you mean {near[0]}?)" if near else "")


class Handlers:
    """SGLang's handlers of both kinds of requests, around an engine's tokenizer manager."""

    def __init__(self, manager: Any, templates: Any) -> None:
        from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

        self._manager = manager
        self._by_url = {COMPLETIONS: OpenAIServingCompletion(manager, templates)}
        if manager.tokenizer is not None:
            self._by_url[CHAT] = manager.serving_chat_class(manager, templates)
        # One that tokenizes, but sends nothing and has no request under way.
        self._planner = copy.copy(manager)
        self._planner.rid_to_state = _NoStates()
        self._planner.async_dynamic_batch_tokenizer = None  # it would belong to the planner's event loop

    def plan(self, lines: Sequence[Line]) -> Iterator[Planned | Refused]:
        """Prompt tokens and sampling parameters of each line, or why it cannot run."""
        loop = asyncio.new_event_loop()
        try:
            for line in lines:
                planned: Planned | Refused
                try:
                    planned = loop.run_until_complete(self._plan(line))
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a chat template is a program; a tokenizer may panic
                    planned = Refused(line.number, _INVALID, reason(error))
                yield planned
        finally:
            loop.close()

    async def _plan(self, line: Line) -> Planned:
        handler = self._handler(line.url)
        request = request_of(line)
        if message := handler._validate_request(request):
            raise RefusedError(message)
        adapted, _ = handler._convert_to_internal_request(request, None)
        if has_media := adapted.contains_mm_input():  # the prompt's tokens are known when they have been loaded
            adapted.image_data = adapted.video_data = adapted.audio_data = None
        apart = [getattr(adapted, name, None) for name in _APART]
        adapted.normalize_batch_and_arguments()
        prompts = [
            await self._planner._tokenize_one_request(part)
            for part in ([adapted] if adapted.is_single else [adapted[number] for number in range(adapted.batch_size)])
        ]
        for prompt in prompts:
            _check_numbers(prompt, int(self._manager.model_config.vocab_size))
        sampling = prompts[0].sampling_params
        limit = sampling.max_new_tokens
        samples = len(prompts) * max(1, sampling.n)  # SGLang takes a negative number for one
        minimum = _INT32_MAX if sampling.ignore_eos else sampling.min_new_tokens
        if has_media or len(prompts) > 1:  # several share the request's sampling parameters, and so would its place
            return Planned(line.number, None, limit, minimum, samples)
        tokens = np.array(prompts[0].input_ids, dtype=np.int32)
        return Planned(line.number, tokens, limit, minimum, samples, repr(apart) if any(apart) else "")

    async def run(self, task: Task) -> Answer:
        """The answer of SGLang's handler. Raises RefusedError, or what the engine raises."""
        request = request_of(task)
        if task.place is not None:
            request.custom_params = {**(request.custom_params or {}), CUSTOM_PARAMETER: task.place}
        if task.limit is not None:
            request.max_completion_tokens = task.limit
        handler = copy.copy(self._handler(task.url))
        handler.tokenizer_manager = heard = _Heard(self._manager)
        return heard.answer(await handler.handle_request(request, None))

    def _handler(self, url: str) -> Any:
        if url not in self._by_url:
            raise RefusedError("the model has no tokenizer; only /v1/completions with token ids as the prompt can run")
        return self._by_url[url]


class _NoStates(dict[str, Any]):
    """States of requests that are not under way."""

    def __missing__(self, rid: str) -> Any:
        return SimpleNamespace(time_stats=SimpleNamespace(set_tokenize_finish_time=lambda: None))


_APART = ("lora_path", "extra_key", "cache_salt")  # of requests that differ in them SGLang's cache shares nothing


def _check_numbers(prompt: Any, vocabulary: int) -> None:
    """Raises RefusedError for what SGLang sends to its scheduler, which would end."""
    sampling, tokens = prompt.sampling_params, prompt.input_ids
    if not tokens:
        raise RefusedError("the prompt has no tokens")
    for where, ids in (("the prompt", tokens), ("stop_token_ids", list(sampling.stop_token_ids or [0]))):
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocabulary:
                raise RefusedError(
                    f"{where} has the token id {token}; those of the model are from 0 to {vocabulary - 1}"
                )
    if (sampling.min_new_tokens or 0) > 0 and any(getattr(sampling, name, None) for name in _GRAMMARS):
        # Where the grammar allows the end alone, no token is left. Drawn beside others, that ends the scheduler.
        raise RefusedError("min_tokens with a grammar can end SGLang's scheduler; leave min_tokens away")
    bias = [abs(value) for value in (sampling.logit_bias or {}).values()]
    for name, value, least, most in (
        ("max_tokens", sampling.max_new_tokens, 0, _INT32_MAX),
        ("min_tokens", sampling.min_new_tokens, 0, _INT32_MAX),
        ("top_k", sampling.top_k, 1, _INT32_MAX),
        ("seed", getattr(sampling, "sampling_seed", None), -_INT64_MAX - 1, _INT64_MAX),
        ("temperature", sampling.temperature, 0, _FLOAT32_MAX),
        ("repetition_penalty", sampling.repetition_penalty, _LEAST_PENALTY, 2),
        ("logit_bias", max(bias, default=0) if all(value == value for value in bias) else float("nan"), 0, _MOST_BIAS),
        ("logprobs", prompt.top_logprobs_num, 0, vocabulary),
    ):
        if value is not None and not least <= value <= most:
            raise RefusedError(f"{name} = {shortened(value)}: expected {least} to {most}")


class _Heard:
    """The tokenizer manager as one request's handler has it; keeps what the engine answers."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._samples: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, *arguments: Any) -> Any:
        async for result in self._manager.generate_request(*arguments):
            self._samples = result if isinstance(result, list) else [result]
            for sample in self._samples:
                sample.setdefault("text", "")  # of a model without a tokenizer there is none
            yield result

    def answer(self, response: Any) -> Answer:
        """What the handler made of it. Raises RefusedError if it is an error."""
        from fastapi.encoders import jsonable_encoder

        if hasattr(response, "status_code"):
            told = orjson.loads(response.body)
            raise RefusedError(str(told.get("message") or told.get("error") or told))
        for sample in self._samples:
            finish = sample["meta_info"].get("finish_reason") or {}
            if finish.get("type") == "abort":
                raise RefusedError(str(finish.get("message", "aborted")))
        body = jsonable_encoder(response)
        if self._manager.tokenizer is None:
            for choice, sample in zip(body["choices"], self._samples, strict=True):
                choice["token_ids"] = sample["output_ids"]
        cached = sum(int(sample["meta_info"].get("cached_tokens", 0)) for sample in self._samples)
        usage = body["usage"]
        return Answer(body, usage["prompt_tokens"], usage["completion_tokens"] or 0, cached)


def reason(error: BaseException) -> str:
    """An exception of SGLang's in words: FastAPI's carry them in `detail`."""
    if isinstance(error, (RefusedError, ValueError)):
        return str(error)
    return str(getattr(error, "detail", None) or f"{type(error).__name__}: {error}")
