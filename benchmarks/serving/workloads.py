"""What `benchmarks.serving` asks a server: requests as token ids, with arrival times, drawn from a seed.

    rl             reinforcement learning: every prompt once, `samples` continuations each (SGLang's n)
    no-sharing     prompts that have nothing in common, all at once
    shared-prefix  the shape of SGLang's generated-shared-prefix set: groups of requests below one system prompt each
    conversation   PAT's conversation workload (ASPLOS 2026, section 8.2): system prompt of three levels, 46, 348 and
                   2,123 tokens, whose language (after level 1) and country (after level 2) vary, before a user's turn
    mooncake       Mooncake's conversation trace: block hashes become tokens, arrivals scaled to the rate

PAT takes the lengths of user turns and answers from the BurstGPT trace, which is not shipped here. They are drawn from
log-normal distributions instead, fitted by eye to the first rows of its conversation log: user turns with median 560
and sigma 1.3, answers with median 340 and sigma 0.8 (of the logarithm), both cut at 8 below and at 3,072 and 2,048
above, which fits a context of 8,192. Arrivals are a Poisson process.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np

from sgl_prefix_attn.demo.workload import TRACE_SLICE, Request, Vocabulary, trace_requests
from sgl_prefix_attn.trace import read_trace

WORKLOADS = ("rl", "no-sharing", "shared-prefix", "conversation", "mooncake")
CONVERSATION_LEVELS = (46, 348, 2123)
LANGUAGES = COUNTRIES = 2
TURN = (560.0, 1.3, 3072)  # median, sigma of the logarithm, most
ANSWER = (340.0, 0.8, 2048)
FEWEST_TOKENS = 8
_RL, _SHARED, _CONVERSATION, _OWN, _ALONE = range(5)  # first part of the keys that tokens are drawn from


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of a workload; None: what the workload is published or usual with.

    Attributes:
        groups: prompts (rl) or system prompts (shared-prefix).
        samples: continuations of a prompt (rl) or requests of a group (shared-prefix).
        prompt_tokens: of a prompt (rl, no-sharing) or system prompt (shared-prefix).
        output_tokens: generated for every request of rl, no-sharing and shared-prefix; the most for the others.
        requests: of no-sharing, conversation and mooncake.
        rate: requests a second on average; None: 8 (conversation), as recorded (mooncake), all at once (the others).
    """

    groups: int | None = None
    samples: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None
    rate: float | None = None
    trace: Path = TRACE_SLICE
    seed: int = 0


def make_requests(workload: str, sizes: Sizes, vocabulary: Vocabulary, context_length: int) -> list[Request]:
    """The requests of a workload.

    Raises:
        ValueError: an unknown workload, a size that is not positive, or a request longer than the context.
    """
    for field in ("groups", "samples", "prompt_tokens", "output_tokens", "requests", "rate"):
        value = getattr(sizes, field)
        if value is not None and not value > 0:
            raise ValueError(f"{field} is {value}; it must be positive")
    makers = {"rl": _rl, "no-sharing": _no_sharing, "shared-prefix": _shared_prefix, "conversation": _conversation}
    if workload == "mooncake":
        return _mooncake(sizes, vocabulary, context_length)
    if workload not in makers:
        raise ValueError(f"no workload {workload!r}; there are {', '.join(WORKLOADS)}")
    requests = makers[workload](sizes, vocabulary)
    longest = max(requests, key=lambda request: len(request.prompt) + request.max_new_tokens)
    needed = len(longest.prompt) + longest.max_new_tokens
    if needed > context_length:
        raise ValueError(f"{workload}: {longest.name} needs {needed} tokens but the context holds {context_length}")
    return requests


def _rl(sizes: Sizes, vocabulary: Vocabulary) -> list[Request]:
    arrivals = _arrivals(sizes.groups or 64, sizes.rate, sizes.seed)
    return [
        Request(
            f"prompt-{number}", vocabulary.tokens(sizes.prompt_tokens or 4096, sizes.seed, _RL, number),
            sizes.output_tokens or 256, samples=sizes.samples or 16, arrival_seconds=arrival,
        )
        for number, arrival in enumerate(arrivals)
    ]  # fmt: skip


def _no_sharing(sizes: Sizes, vocabulary: Vocabulary) -> list[Request]:
    return [
        Request(
            f"alone-{number}", vocabulary.tokens(sizes.prompt_tokens or 2048, sizes.seed, _ALONE, number),
            sizes.output_tokens or 256, arrival_seconds=arrival,
        )
        for number, arrival in enumerate(_arrivals(sizes.requests or 256, sizes.rate, sizes.seed))
    ]  # fmt: skip


def _shared_prefix(sizes: Sizes, vocabulary: Vocabulary) -> list[Request]:
    """Sizes default to those of SGLang's bench_serving; requests arrive in random order, as there."""
    groups, members = sizes.groups or 64, sizes.samples or 16
    system = [vocabulary.tokens(sizes.prompt_tokens or 2048, sizes.seed, _SHARED, group) for group in range(groups)]
    order = np.random.default_rng((sizes.seed, _SHARED)).permutation(groups * members).tolist()
    return [
        Request(
            f"group-{number // members}-{number % members}",
            system[number // members] + vocabulary.tokens(128, sizes.seed, _OWN, number),
            sizes.output_tokens or 256, arrival_seconds=arrival,
        )
        for number, arrival in zip(order, _arrivals(len(order), sizes.rate, sizes.seed), strict=True)
    ]  # fmt: skip


def _conversation(sizes: Sizes, vocabulary: Vocabulary) -> list[Request]:
    rng = np.random.default_rng((sizes.seed, _CONVERSATION))
    count = sizes.requests or 500
    first, second, third = CONVERSATION_LEVELS
    prompts = {
        (language, country): vocabulary.tokens(first, sizes.seed, _CONVERSATION)
        + vocabulary.tokens(second, sizes.seed, _CONVERSATION, language)
        + vocabulary.tokens(third, sizes.seed, _CONVERSATION, language, country)
        for language, country in itertools.product(range(LANGUAGES), range(COUNTRIES))
    }
    turns, answers = (_lengths(rng, count, *of) for of in (TURN, ANSWER))
    most = sizes.output_tokens or ANSWER[2]
    return [
        Request(
            f"turn-{number}",
            prompts[int(rng.integers(LANGUAGES)), int(rng.integers(COUNTRIES))]
            + vocabulary.tokens(turns[number], sizes.seed, _OWN, number),
            min(answers[number], most), arrival_seconds=arrival,
        )
        for number, arrival in enumerate(_arrivals(count, sizes.rate or 8.0, sizes.seed))
    ]  # fmt: skip


def _mooncake(sizes: Sizes, vocabulary: Vocabulary, context_length: int) -> list[Request]:
    rows = read_trace(sizes.trace, sizes.requests or 200)
    seconds = (rows[-1].timestamp - rows[0].timestamp) / 1000
    speed = sizes.rate * seconds / len(rows) if sizes.rate and seconds else 1.0
    if sizes.output_tokens is not None:
        rows = [row.model_copy(update={"output_length": min(row.output_length, sizes.output_tokens)}) for row in rows]
    return trace_requests(rows, vocabulary, context_length, speed=speed)


def _lengths(rng: np.random.Generator, count: int, median: float, sigma: float, most: int) -> list[int]:
    drawn = median * np.exp(sigma * rng.standard_normal(count))
    return np.clip(np.rint(drawn), FEWEST_TOKENS, most).astype(int).tolist()


def _arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds; a Poisson process, or all at once where there is no rate."""
    if rate is None:
        return [0.0] * count
    gaps = np.random.default_rng((seed, count)).exponential(1 / rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist()
