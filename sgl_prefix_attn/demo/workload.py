"""What the demonstration and the end-to-end tests ask a server: prompts as token ids, with exactly known sharing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_prefix_attn.trace import BLOCK_TOKENS, TraceRow

TRACE_SLICE = Path(__file__).parent / "data" / "mooncake_conversation_slice.jsonl"  # of Mooncake's conversation trace


@dataclasses.dataclass(frozen=True)
class Request:
    """One call of /generate.

    name: for messages. prompt: token ids. samples: how many continuations (SGLang's n). logit_bias:
    added to the logits of these token ids at every step; with greedy decoding it makes continuations of one prompt
    differ, repeatably. arrival_seconds: when to send it, from the start of the replay.
    """

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    samples: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    arrival_seconds: float = 0.0

    def body(self) -> dict[str, Any]:
        """JSON body of the call: greedy, a fixed number of tokens, streamed."""
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": True,
            "n": self.samples,
        }
        if self.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        # No "rid": SGLang aborts the id of a finished stream two seconds later, and with it a new request of that id.
        return {"input_ids": list(self.prompt), "sampling_params": sampling, "stream": True}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Token ids prompts may use: first <= id < end."""

    first: int
    end: int

    def tokens(self, count: int, *key: int) -> tuple[int, ...]:
        """`count` ids that depend on `key` alone; a longer draw with the same key begins with a shorter one."""
        return tuple(np.random.default_rng(key).integers(self.first, self.end, count).tolist())


def trace_requests(
    rows: Sequence[TraceRow],
    vocabulary: Vocabulary,
    context_length: int,
    *,
    speed: float = 1.0,
    output_scale: float = 1.0,
) -> list[Request]:
    """The trace as requests of the same sharing, shrunk so that the longest prompt and its output fit the context.

    Every block hash becomes a run of tokens drawn from the hash, so equal hashes are equal tokens and prompts share
    exactly what they share in the trace, block by block. `speed` divides the arrival times, `output_scale` multiplies
    the numbers of generated tokens. Raises ValueError when the context is too short for the longest prompt even with
    one token a block, or when a factor is not positive.
    """
    for name, factor in (("speed", speed), ("output_scale", output_scale)):
        if not factor > 0:
            raise ValueError(f"{name}={factor} must be positive")
    outputs = [max(1, round(row.output_length * output_scale)) for row in rows]
    block = min(
        BLOCK_TOKENS,
        *((context_length - output) // len(row.hash_ids) for row, output in zip(rows, outputs, strict=True)),
    )
    if block < 1:
        raise ValueError(f"context_length={context_length} is too short for the trace's longest request")
    begin = rows[0].timestamp
    requests = []
    for number, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        length = max(1, math.ceil(row.input_length * block / BLOCK_TOKENS))
        blocks = [vocabulary.tokens(block, hash_id) for hash_id in row.hash_ids]
        prompt = tuple(token for tokens in blocks for token in tokens)[:length]
        arrival = (row.timestamp - begin) / 1000 / speed
        requests.append(Request(f"trace-{number}", prompt, output, arrival_seconds=arrival))
    return requests


def sample_group(
    vocabulary: Vocabulary, prompt_tokens: int, max_new_tokens: int, samples: int = 16, *, seed: int = 0
) -> list[Request]:
    """One prompt, one request for `samples` continuations: what reinforcement learning asks for, as SGLang's n.

    Decoding is greedy, so the continuations are equal; each still has its own KV.
    """
    prompt = vocabulary.tokens(prompt_tokens, seed)
    return [Request("samples", prompt, max_new_tokens, samples=samples)]


def diverging_group(
    vocabulary: Vocabulary, prompt_tokens: int, max_new_tokens: int, samples: int = 16, *, seed: int = 0
) -> list[Request]:
    """One prompt, `samples` requests whose continuations differ, repeatably.

    Each request has a random bias on the logits of its own (a draw of Gumbel noise that is kept for all its steps), so
    greedy decoding takes different ways. SGLang's own seeded sampling needs a deterministic attention backend, which it
    does not have on CPU.
    """
    prompt = vocabulary.tokens(prompt_tokens, seed)
    requests = []
    for number in range(samples):
        noise = np.random.default_rng((seed, number)).gumbel(size=vocabulary.end - vocabulary.first)
        bias = tuple((vocabulary.first + index, round(float(value), 3)) for index, value in enumerate(noise))
        requests.append(Request(f"sample-{number}", prompt, max_new_tokens, logit_bias=bias))
    return requests


def three_level_prompts(
    vocabulary: Vocabulary,
    max_new_tokens: int,
    *,
    level_tokens: tuple[int, int, int] = (192, 96, 48),
    fan_out: tuple[int, int] = (3, 4),
    seed: int = 0,
) -> list[Request]:
    """Prompts of a tree: all share a system prompt, groups share a document, every request has its own question."""
    system, document, question = level_tokens
    documents, questions = fan_out
    root = vocabulary.tokens(system, seed, 0)
    requests = []
    for group in range(documents):
        middle = vocabulary.tokens(document, seed, 1, group)
        for member in range(questions):
            own = vocabulary.tokens(question, seed, 2, group, member)
            requests.append(Request(f"tree-{group}-{member}", root + middle + own, max_new_tokens))
    return requests
