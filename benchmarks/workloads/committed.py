"""The batches whose GPU times are committed, by name. A listed batch is the same in every run.

Families, each case named `family/detail`:

    pat/01..20      the trees of PAT's Figure 9 (ASPLOS 2026)
    fasttree/01..15 the trees of FastTree's kernel benchmark (MLSys 2025), same grammar
    random/...      ragged forests, drawn from a seed: several roots, requests that leave anywhere
    rl/...          reinforcement learning: 64 prompts, 16 samples each, 1,024 tokens of output so far
    agents/...      one system prompt of 8K tokens, 256 requests with 64 to 2,048 tokens of their own
    chat/...        PAT's conversations (section 8.2): system prompts of 46, 348 and 2,123 tokens, two languages and two
                    countries, before a user's turn and a part of the answer; few requests run at a time
    none/...        no sharing: batch x length
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.workloads.case import Heads, Path

# Nodes per level / tokens per level; the last level is one request each and its tokens are the request's own.
PAT_TREES = (
    "1,10/4096,416",
    "1,256/256,32",
    "1,1024/2048,32",
    "1,2,64/1024,256,256",
    "1,4,256/32,256,32",
    "1,8,512/32,512,256",
    "1,8,512/32,2048,256",
    "1,8,512/512,512,256",
    "1,4,8,256/32,256,256,32",
    "1,4,16,512/1024,256,128,32",
    "1,4,16,64,256,1024/256,32,256,64,32,256",
    "1,16,32,64,128,1024/256,128,64,32,32,32",
    "1,16,32,64,256,1024/256,128,64,32,32,32",
    "1,8,16,32,64,128,1024/256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024/256,128,64,32,32,32,32",
    "2,8,16,256/256,256,32,32",
    "4,16,256,512/512,32,128,32",
    "8,16,32,256/512,512,256,32",
    "256/1024",
    "256/4096",
)
# Query heads, KV heads.
PAT_HEADS = ((32, 32), (16, 8), (32, 8), (64, 8))

FASTTREE_TREES = (
    "1,2,64/8,256,32",
    "1,4,256/8,256,32",
    "1,4,8,256/8,256,256,32",
    "1,256/256,32",
    "1,1024/2048,32",
    "1,16,64/1024,256,32",
    "1,4,16,512/1024,256,128,32",
    "1,4,16,64,256,1024/256,8,256,64,32,256",
    "1,10/4000,400",
    "1,2,4,8,16,32,64,128,1024/16,16,16,16,16,16,16,16,16",
    "1,2,4,8,16,32,64,128,1024/256,128,64,16,16,16,16,16,16",
    "1,8,16,32,64,128,1024/256,128,64,16,16,16,16",
    "1,8,16,32,64,256,1024/256,128,64,16,16,16,16",
    "1,16,32,64,128,1024/256,128,64,16,16,16",
    "1,16,32,64,256,1024/256,128,64,16,16,16",
)
FASTTREE_HEADS: tuple[Heads, ...] = ((16, 1), (32, 8), (32, 32))
USUAL_HEADS: tuple[Heads, ...] = ((32, 8),)
RANDOM_HEADS: tuple[Heads, ...] = ((32, 8), (64, 8))

# Requests, levels, most tokens of a node, most tokens of a tail.
RANDOM_FORESTS = ((8, 3, 2048, 512), (64, 3, 1024, 512), (64, 8, 256, 64), (256, 4, 512, 512), (256, 6, 1024, 128),
                  (512, 8, 256, 256))  # fmt: skip
RL_PROMPTS, RL_SAMPLES, RL_OUTPUT = 64, 16, 1024
RL_PROMPT_TOKENS = (1024, 2048, 4096, 8192)
AGENTS, AGENT_PROMPT_TOKENS = 256, 8192
CHAT_BATCHES, CHAT_LEVELS = (4, 8, 16, 32, 64), (46, 348, 2123)
NONE_BATCHES = (1, 8, 32, 64, 128, 256)
NONE_TOKENS = (512, 2048, 8192, 32768)


def tree_paths(tree: str) -> tuple[list[Path], list[int]]:
    """Paths and sequence lengths of the requests of a uniform tree, e.g. "1,4,256/32,256,32".

    Nodes per level / tokens per level, as `explain --tree` reads it. The last level is one request each.

    Raises:
        ValueError: not of that form.
    """
    nodes, _, tokens = tree.partition("/")
    counts, lengths = [int(n) for n in nodes.split(",")], [int(n) for n in tokens.split(",")]
    if len(counts) != len(lengths) or any(below % above for above, below in itertools.pairwise(counts)):
        raise ValueError(f"{tree!r}: expected as many lengths as levels, and levels that divide each other")
    requests = counts[-1]
    paths: list[Path] = [[] for _ in range(requests)]
    first, begin = 0, 0
    for count, length in zip(counts[:-1], lengths[:-1], strict=True):
        for request, path in enumerate(paths):
            path.append((first + request * count // requests, begin, begin + length))
        first, begin = first + count, begin + length
    return paths, [begin + lengths[-1]] * requests


def random_forest(
    seed: int, requests: int, levels: int, node_tokens: int, tail_tokens: int
) -> tuple[list[Path], list[int]]:
    """A ragged forest: about one node for two requests, at most `levels` deep, new ones mostly below recent ones."""
    rng = np.random.default_rng(seed)
    nodes: list[Path] = []
    for node in range(max(2, requests // 2)):
        recent = nodes[max(0, len(nodes) - 1 - int(rng.geometric(0.3)))] if nodes else []
        parent = recent if len(recent) < levels and rng.random() < 0.85 else []
        begin = parent[-1][2] if parent else 0
        nodes.append([*parent, (node, begin, begin + int(rng.integers(1, node_tokens + 1)))])
    paths = [nodes[int(rng.integers(len(nodes)))] if rng.random() < 0.95 else [] for _ in range(requests)]
    tails = rng.integers(1, tail_tokens + 1, requests)
    return paths, [(path[-1][2] if path else 0) + int(tail) for path, tail in zip(paths, tails, strict=True)]


def groups(prompts: int, samples: int, prompt_tokens: int, own_tokens: list[int]) -> tuple[list[Path], list[int]]:
    """`prompts` prompts with `samples` requests each; own_tokens by request."""
    paths: list[Path] = [[(prompt, 0, prompt_tokens)] for prompt in range(prompts) for _ in range(samples)]
    return paths, [prompt_tokens + own for own in own_tokens]


def conversations(requests: int) -> tuple[list[Path], list[int]]:
    """Requests of PAT's conversation workload; lengths drawn as benchmarks/serving/workloads.py draws them."""
    rng = np.random.default_rng(requests)
    ends = np.cumsum(CHAT_LEVELS).tolist()
    paths: list[Path] = []
    lengths: list[int] = []
    for _ in range(requests):
        language, country = int(rng.integers(2)), int(rng.integers(2))
        nodes = (0, 1 + language, 3 + 2 * language + country)
        paths.append(list(zip(nodes, [0, *ends[:2]], ends, strict=True)))
        turn, answer = np.clip(rng.lognormal(np.log((560, 340)), (1.3, 0.8)), 8, (3072, 2048)).astype(int)
        lengths.append(ends[2] + int(turn) + int(rng.integers(1, answer + 1)))
    return paths, lengths


def unshared(requests: int, tokens: int) -> tuple[list[Path], list[int]]:
    """Requests that share nothing."""
    return [[] for _ in range(requests)], [tokens] * requests


Build = Callable[[], tuple[list[Path], list[int]]]


def catalogue() -> Iterator[tuple[str, tuple[Heads, ...], Build]]:
    """Every case: its name, the head settings it is measured with, and a function that makes its paths and lengths."""
    for number, tree in enumerate(PAT_TREES, 1):
        yield f"pat/{number:02}", PAT_HEADS, partial(tree_paths, tree)
    for number, tree in enumerate(FASTTREE_TREES, 1):
        yield f"fasttree/{number:02}", FASTTREE_HEADS, partial(tree_paths, tree)
    for seed, shape in enumerate(RANDOM_FORESTS):
        name = f"random/b{shape[0]}_d{shape[1]}_n{shape[2]}_t{shape[3]}"
        yield name, RANDOM_HEADS, partial(random_forest, seed, *shape)
    own = [RL_OUTPUT] * (RL_PROMPTS * RL_SAMPLES)
    for tokens in RL_PROMPT_TOKENS:
        yield f"rl/p{tokens}", USUAL_HEADS, partial(groups, RL_PROMPTS, RL_SAMPLES, tokens, own)
    agents = np.random.default_rng(0).integers(64, 2049, AGENTS).tolist()
    yield f"agents/b{AGENTS}", USUAL_HEADS, partial(groups, 1, AGENTS, AGENT_PROMPT_TOKENS, agents)
    for batch in CHAT_BATCHES:
        yield f"chat/b{batch}", USUAL_HEADS, partial(conversations, batch)
    for batch in NONE_BATCHES:
        for tokens in NONE_TOKENS:
            yield f"none/b{batch}_l{tokens}", USUAL_HEADS, partial(unshared, batch, tokens)
