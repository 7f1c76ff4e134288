"""The decode batches that `gpu_attention` measures, as radix-tree paths; no tensors here.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property

import numpy as np

from benchmarks.kernel.trees import PAT_HEADS, PAT_TREES, Path, tree_paths
from sgl_prefix_attn.core.forest import Int64Array, PrefixForest

Heads = tuple[int, int]  # query heads, KV heads

HEAD_DIM = 128

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
# Trees of every kind of difficulty, for a run of a minute.
QUICK = ("pat/01", "pat/03", "pat/09", "pat/12", "pat/18", "pat/19", "random/b64_*", "rl/p4096", "none/b32_l2048")


@dataclass(frozen=True)
class Case:
    """One decode step: what its requests share and how long they are.

    Attributes:
        paths: of every request, depth first: (node id, start, end) segments. Requests of a node stand together.
        seq_lens: KV positions of every request, the step's own token included.
    """

    name: str
    heads: Heads
    paths: tuple[tuple[tuple[int, int, int], ...], ...]
    seq_lens: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.name}@{self.heads[0]}/{self.heads[1]}"

    @cached_property
    def lengths(self) -> Int64Array:
        return np.asarray(self.seq_lens, dtype=np.int64)

    @cached_property
    def tail_begin(self) -> Int64Array:
        """Positions from here on are the request's own."""
        return np.asarray([path[-1][2] if path else 0 for path in self.paths], dtype=np.int64)

    @cached_property
    def unique_tokens(self) -> int:
        """KV positions of the batch, each counted once."""
        nodes = {node for path in self.paths for node in path}
        return sum(end - begin for _, begin, end in nodes) + int((self.lengths - self.tail_begin).sum())

    @property
    def tokens(self) -> int:
        """KV positions of all requests, shared ones as often as they are used."""
        return sum(self.seq_lens)

    def forest(self) -> PrefixForest:
        return PrefixForest.from_paths(self.paths, prefix_lens=(self.lengths - 1).tolist())

    def kv_bytes(self, element_size: int = 2) -> int:
        return 2 * self.unique_tokens * self.heads[1] * HEAD_DIM * element_size

    def table(self) -> np.ndarray:
        """int32 [requests, longest]: slot of each position if slots were handed out in order; 0 beyond the end."""
        table = np.zeros((len(self.paths), max(self.seq_lens)), dtype=np.int32)
        slots_of_node: dict[int, np.ndarray] = {}
        taken = 0
        for request, (path, length) in enumerate(zip(self.paths, self.seq_lens, strict=True)):
            for node, begin, end in path:
                if node not in slots_of_node:
                    slots_of_node[node] = np.arange(taken, taken + end - begin, dtype=np.int32)
                    taken += end - begin
                table[request, begin:end] = slots_of_node[node]
            begin = path[-1][2] if path else 0
            table[request, begin:length] = np.arange(taken, taken + length - begin, dtype=np.int32)
            taken += length - begin
        return table


def make_case(name: str, heads: Heads, paths: list[Path], seq_lens: list[int]) -> Case:
    """A case with its requests put in depth-first order, as cascade attention needs them."""
    order = sorted(range(len(paths)), key=lambda request: [node for node, _, _ in paths[request]])
    return Case(
        name, heads, tuple(tuple(paths[request]) for request in order), tuple(seq_lens[request] for request in order)
    )


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


Build = Callable[[], tuple[list[Path], list[int]]]


def catalogue() -> Iterator[tuple[str, tuple[Heads, ...], Build]]:
    """Every case: its name, the head settings it is measured with, and a function that makes its paths and lengths."""
    for number, tree in enumerate(PAT_TREES, 1):
        yield f"pat/{number:02}", PAT_HEADS, lambda tree=tree: tree_paths(tree)
    for number, tree in enumerate(FASTTREE_TREES, 1):
        yield f"fasttree/{number:02}", FASTTREE_HEADS, lambda tree=tree: tree_paths(tree)
    for seed, shape in enumerate(RANDOM_FORESTS):
        name = f"random/b{shape[0]}_d{shape[1]}_n{shape[2]}_t{shape[3]}"
        yield name, RANDOM_HEADS, lambda seed=seed, shape=shape: random_forest(seed, *shape)
    own = [RL_OUTPUT] * (RL_PROMPTS * RL_SAMPLES)
    for tokens in RL_PROMPT_TOKENS:
        yield f"rl/p{tokens}", USUAL_HEADS, lambda tokens=tokens: groups(RL_PROMPTS, RL_SAMPLES, tokens, own)
    agents = np.random.default_rng(0).integers(64, 2049, AGENTS).tolist()
    yield f"agents/b{AGENTS}", USUAL_HEADS, lambda: groups(1, AGENTS, AGENT_PROMPT_TOKENS, agents)
    for batch in CHAT_BATCHES:
        yield f"chat/b{batch}", USUAL_HEADS, lambda batch=batch: conversations(batch)
    for batch in NONE_BATCHES:
        for tokens in NONE_TOKENS:
            yield f"none/b{batch}_l{tokens}", USUAL_HEADS, lambda b=batch, t=tokens: ([[] for _ in range(b)], [t] * b)


def select(patterns: list[str], heads: list[Heads] | None, quick: bool = False) -> list[Case]:
    """Cases whose names match one of the globs, in the order of the catalogue, grouped by head setting.

    Args:
        patterns: none: every case.
        heads: none: the head settings a family is published or usual with; else exactly these, for every case.
        quick: only the few cases of `QUICK`, at 32/8.
    """
    wanted = patterns or (list(QUICK) if quick else ["*"])
    chosen: list[Case] = []
    for name, usual, build in catalogue():
        if any(fnmatch(name, pattern) for pattern in wanted):
            paths, seq_lens = build()
            settings = heads or ([(32, 8)] if quick else list(usual))
            chosen.extend(make_case(name, setting, paths, seq_lens) for setting in settings)
    order = list(dict.fromkeys(case.heads for case in chosen))
    return sorted(chosen, key=lambda case: order.index(case.heads))
