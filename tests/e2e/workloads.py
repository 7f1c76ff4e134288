"""The requests of the end-to-end tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from sgl_prefix_attn.demo.workload import Request, Vocabulary, diverging_group, sample_group, three_level_prompts


def three_levels(vocabulary: Vocabulary) -> list[Request]:
    """System prompt, three documents, four questions each; the shared parts are in the cache before they are needed."""
    return three_level_prompts(vocabulary, max_new_tokens=32)


def level_seeds(requests: Sequence[Request]) -> list[Request]:
    """One request per distinct document, to bring the shared levels of `three_levels` into the cache first."""
    return [dataclasses.replace(request, max_new_tokens=1) for request in requests if request.name.endswith("-0")]


def ragged(vocabulary: Vocabulary, count: int = 32) -> list[Request]:
    """Prompts of 1 to about 900 tokens and outputs of 1 to 48; most prompts continue one of four common beginnings."""
    draw = np.random.default_rng(7)
    beginnings = [vocabulary.tokens(int(length), 7, 0, index) for index, length in enumerate((600, 300, 150, 40))]
    requests = []
    for number in range(count):
        beginning = beginnings[number % 5] if number % 5 < 4 else ()
        kept = beginning[: int(draw.integers(1, len(beginning) + 1))] if beginning and number % 3 == 0 else beginning
        own = vocabulary.tokens(int(draw.integers(1, 300)), 7, 1, number)
        requests.append(Request(f"ragged-{number}", kept + own, int(draw.integers(1, 49))))
    requests[4] = dataclasses.replace(requests[4], prompt=requests[4].prompt[:1])
    requests[8] = dataclasses.replace(requests[9], name="ragged-8")  # two equal requests
    return requests


def samples(vocabulary: Vocabulary) -> list[Request]:
    return sample_group(vocabulary, prompt_tokens=500, max_new_tokens=32, samples=16, seed=8)


def diverging(vocabulary: Vocabulary) -> list[Request]:
    return diverging_group(vocabulary, prompt_tokens=300, max_new_tokens=48, samples=16, seed=9)


def to_retract(vocabulary: Vocabulary) -> list[Request]:
    """Short prompts and long outputs: a small pool admits them all and cannot hold them to the end."""
    return diverging_group(vocabulary, prompt_tokens=64, max_new_tokens=200, samples=16, seed=9)


def prefill_beside_decode(vocabulary: Vocabulary) -> tuple[list[Request], list[Request]]:
    """Four requests that decode for long, and four long prompts to arrive meanwhile; all share a beginning.

    A client on a loaded machine sees tokens half a second late, so 160 steps were over before the prompts arrived.
    """
    shared = vocabulary.tokens(200, 10, 0)
    decoding = [Request(f"decode-{i}", shared + vocabulary.tokens(5, 10, 1, i), 640) for i in range(4)]
    arriving = [Request(f"prefill-{i}", shared + vocabulary.tokens(400 + 37 * i, 10, 2, i), 16) for i in range(4)]
    return decoding, arriving


def late_split(vocabulary: Vocabulary) -> tuple[list[Request], list[Request]]:
    """Six requests that run on one radix node, and a late one that ends within it."""
    shared = vocabulary.tokens(400, 11)
    running = [Request(f"running-{i}", shared + vocabulary.tokens(3, 11, 1, i), 120) for i in range(6)]
    late = [Request("late", shared[:250] + vocabulary.tokens(4, 11, 2), 60)]
    return running, late


def refills(vocabulary: Vocabulary) -> list[Request]:
    """Prompts for rollouts: asked for again, they are cached but for their last token. Two share most, one is short."""
    prompts = [vocabulary.tokens(length, 12, index) for index, length in enumerate((260, 120, 61, 2))]
    return [
        *(Request(f"refill-{index}", prompt, 60) for index, prompt in enumerate(prompts)),
        Request("refill-longer", prompts[0] + vocabulary.tokens(30, 12, 9), 60),
        Request("refill-branch", prompts[1][:80] + vocabulary.tokens(50, 12, 10), 60),
    ]


ALL: dict[str, Callable[[Vocabulary], list[Request]]] = {
    "three_levels": three_levels,
    "ragged": ragged,
    "samples": samples,
    "diverging": diverging,
    "to_retract": to_retract,
    "prefill_beside_decode": lambda vocabulary: [*chain(*prefill_beside_decode(vocabulary))],
    "refills": refills,
    "late_split": lambda vocabulary: [*chain(*late_split(vocabulary))],
}
