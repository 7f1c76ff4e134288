"""BatchLLM's workloads as token ids: microbenchmarks (section 6.2.1) and the industry-like one (6.2.2, figure 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Tokens = list[list[int]]


@dataclass(frozen=True)
class Setting:
    """`requests` prompts of `shared` tokens that `degree` of them have in common, and `own` tokens; shuffled."""

    shared: int
    own: int
    degree: int
    requests: int
    output: int = 100

    @property
    def name(self) -> str:
        return f"{self.shared}/{self.own} x{self.degree}"

    def prompts(self, vocabulary: int = 32_000, seed: int = 0) -> Tokens:
        random = np.random.default_rng(seed)
        prompts = []
        for _ in range(-(-self.requests // self.degree)):
            shared = random.integers(10, vocabulary, self.shared).tolist()
            prompts += [shared + random.integers(10, vocabulary, self.own).tolist() for _ in range(self.degree)]
        prompts = prompts[: self.requests]
        random.shuffle(prompts)
        return prompts


def microbenchmarks(requests: int) -> list[Setting]:
    """Prefix and own tokens 2000/200, 2000/1000, 1000/1000, each shared by 2, 4 and 16 requests."""
    return [
        Setting(shared, own, degree, requests)
        for shared, own in ((2000, 200), (2000, 1000), (1000, 1000))
        for degree in (2, 4, 16)
    ]


def long_prefixes(requests: int) -> list[Setting]:
    """Figure 6 and 8: the prefix grows to 16,000 tokens, 16 requests share it."""
    return [Setting(shared, 200, 16, requests) for shared in (4000, 8000, 16_000)]


def industry(requests: int, vocabulary: int = 32_000, seed: int = 0) -> Tokens:
    """Snippet generation: an instruction for all (here 30 tokens), documents, queries; shuffled.

    The paper gives means, 3 queries to a document, 1,570 tokens of prefix, 30 of query, and says the lengths are
    spread; so documents have a geometric number of queries and gamma-distributed lengths with these means.
    """
    random = np.random.default_rng(seed)
    instruction = random.integers(10, vocabulary, 30).tolist()
    prompts: Tokens = []
    while len(prompts) < requests:
        length = max(20, int(random.gamma(4.0, 1540 / 4)))
        document = random.integers(10, vocabulary, length).tolist()
        for _ in range(int(random.geometric(1 / 3))):
            query = random.integers(10, vocabulary, max(3, int(random.gamma(4.0, 30 / 4)))).tolist()
            prompts.append(instruction + document + query)
    prompts = prompts[:requests]
    random.shuffle(prompts)
    return prompts
