"""Requests of rollouts and of what else shares prompts, drawn from a seed.

    rollout    groups of samples; prompts log-normal around a median, outputs exponential
    reasoning  groups of 8 or 16 samples; prompts of 200 to 2,000 tokens, outputs log-normal around a mean
    few-shot   57 prefixes of 400 to 3,500 tokens; 20 questions of 40 to 260 tokens each, short answers
    documents  3 to 5 documents of 15,000 to 110,000 tokens; 1 to 12 questions each

A draw is in the order in which a launcher sends it: requests with the same prefix follow each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from sgl_prefix_attn.demo.workload import Request, Vocabulary

WORKLOADS = ("rollout", "reasoning", "few-shot", "documents")
PROMPT_SIGMA = 0.3
REASONING_SIGMA = 0.7
FEWEST_TOKENS = 8
PREFIXES, QUESTIONS = 57, 20
QUESTION_TOKENS = (40, 260)
LONGEST_QUESTION = QUESTION_TOKENS[1] + 512  # with its answer


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Sizes of a draw.

    Attributes:
        groups: prompts (rollout, reasoning).
        samples: requests per prompt (rollout).
        prompt_tokens: median prompt length (rollout).
        output_tokens: mean output length (rollout, reasoning).
        longest: tokens a request may have, prompt and output together.
    """

    groups: int
    samples: int
    prompt_tokens: int
    output_tokens: int
    longest: int
    seed: int


def drawn_requests(workload: str, sizes: Rollout, vocabulary: Vocabulary) -> list[Request]:
    """The requests of a workload.

    Raises:
        ValueError: the longest request leaves no room for an output.
    """
    if sizes.longest < 4 * FEWEST_TOKENS:
        raise ValueError(f"a request may have {sizes.longest} tokens; {4 * FEWEST_TOKENS} are needed at least")
    if workload == "rollout":
        return rollout_requests(sizes, vocabulary)
    rng = np.random.default_rng((sizes.seed, WORKLOADS.index(workload)))
    if workload == "reasoning":
        return _reasoning(rng, sizes, vocabulary)
    shortest, most = (400, 3500) if workload == "few-shot" else (15_000, 110_000)
    most = min(most, sizes.longest - LONGEST_QUESTION)
    if most < shortest:
        needed = shortest + LONGEST_QUESTION
        raise ValueError(f"{workload} needs {needed} tokens a request, not {sizes.longest}; raise --context-length")
    few = workload == "few-shot"
    return [
        request
        for number in range(PREFIXES if few else int(rng.integers(3, 6)))
        for request in _questions(
            rng, number, vocabulary.tokens(_length(rng, shortest, most), sizes.seed, number),
            QUESTIONS if few else int(rng.integers(1, 13)), (1, 33) if few else (50, 401), vocabulary, sizes.seed,
        )
    ]  # fmt: skip


def rollout_requests(rollout: Rollout, vocabulary: Vocabulary) -> list[Request]:
    """Samples of prompts, each a request of its own."""
    rng = np.random.default_rng((rollout.seed, rollout.prompt_tokens, rollout.output_tokens))
    requests = []
    for group in range(rollout.groups):
        drawn = rollout.prompt_tokens * np.exp(PROMPT_SIGMA * rng.standard_normal())
        length = int(np.clip(round(drawn), FEWEST_TOKENS, rollout.longest // 2))
        prompt = vocabulary.tokens(length, rollout.seed, group)
        outputs = rng.exponential(rollout.output_tokens, rollout.samples)
        requests += _samples(group, prompt, outputs, rollout.longest)
    return requests


def _reasoning(rng: np.random.Generator, sizes: Rollout, vocabulary: Vocabulary) -> list[Request]:
    requests = []
    for group in range(sizes.groups):
        prompt = vocabulary.tokens(_length(rng, 200, min(2000, sizes.longest // 2)), sizes.seed, group)
        drawn = rng.standard_normal(8 * int(rng.integers(1, 3)))
        outputs = sizes.output_tokens * np.exp(REASONING_SIGMA * drawn - REASONING_SIGMA**2 / 2)
        requests += _samples(group, prompt, outputs, sizes.longest)
    return requests


def _samples(group: int, prompt: tuple[int, ...], outputs: np.ndarray, longest: int) -> list[Request]:
    cut = np.clip(outputs, FEWEST_TOKENS, longest - len(prompt)).tolist()
    return [Request(f"group-{group}-{sample}", prompt, int(output)) for sample, output in enumerate(cut)]


def _questions(
    rng: np.random.Generator, number: int, prefix: tuple[int, ...], count: int, answers: tuple[int, int],
    vocabulary: Vocabulary, seed: int,
) -> Iterator[Request]:  # fmt: skip
    for question in range(count):
        own = vocabulary.tokens(int(rng.integers(*QUESTION_TOKENS)), seed, number, question)
        yield Request(f"group-{number}-{question}", prefix + own, int(rng.integers(*answers)))


def _length(rng: np.random.Generator, least: int, most: int) -> int:
    """A length; its logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))
