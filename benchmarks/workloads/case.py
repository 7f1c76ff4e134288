"""One decode step as radix-tree paths and lengths, with the attention shape it is for. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sgl_prefix_attn.core.forest import Int32Array, Int64Array, PrefixForest, Segment
from sgl_prefix_attn.core.planner import ModelShape

Heads = tuple[int, int]  # query heads, KV heads
Path = list[Segment]  # (node id, first position, one past the last position), from position 0 on

HEAD_DIM = 128
KV_BYTES = {"bf16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True)
class Case:
    """One decode step: what its requests share and how long they are.

    Attributes:
        name: `family/detail`, unique within a head setting.
        heads: (query heads, KV heads) of a rank.
        paths: of every request, depth first: (node id, start, end) segments. Requests of a node stand together.
        seq_lens: KV positions of every request, the step's own token included.
        head_dim: elements of a head.
        kv_dtype: a key of KV_BYTES. Queries are bf16.
        detail: the parameters that were drawn, for a reader.
    """

    name: str
    heads: Heads
    paths: tuple[tuple[Segment, ...], ...]
    seq_lens: tuple[int, ...]
    head_dim: int = HEAD_DIM
    kv_dtype: str = "bf16"
    detail: str = ""

    @property
    def family(self) -> str:
        return self.name.split("/")[0]

    @property
    def key(self) -> str:
        shape = "" if self.head_dim == HEAD_DIM else f"-d{self.head_dim}"
        kv_type = "" if self.kv_dtype == "bf16" else f"-{self.kv_dtype}"
        return f"{self.name}@{self.heads[0]}/{self.heads[1]}{shape}{kv_type}"

    @property
    def shape(self) -> ModelShape:
        return ModelShape(*self.heads, self.head_dim, kv_bytes=KV_BYTES[self.kv_dtype])

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
        return unique_tokens(self.paths, self.seq_lens)

    @property
    def tokens(self) -> int:
        """KV positions of all requests, shared ones as often as they are used."""
        return sum(self.seq_lens)

    def forest(self) -> PrefixForest:
        return PrefixForest.from_paths(self.paths, prefix_lens=(self.lengths - 1).tolist())

    def kv_bytes(self, element_size: int | None = None) -> int:
        """Bytes of the unique K and V. element_size: of one element; None: the case's own."""
        size = KV_BYTES[self.kv_dtype] if element_size is None else element_size
        return 2 * self.unique_tokens * self.heads[1] * self.head_dim * size

    def table(self) -> Int32Array:
        """int32 [requests, longest]: slot of each position if slots were handed out in order; 0 beyond the end."""
        table = np.zeros((len(self.paths), max(self.seq_lens)), dtype=np.int32)
        slots_of_node: dict[int, Int32Array] = {}
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


def unique_tokens(paths: Iterable[Sequence[Segment]], seq_lens: Iterable[int]) -> int:
    """KV positions of requests with these paths and lengths, each counted once."""
    nodes: set[Segment] = set()
    own = 0
    for path, length in zip(paths, seq_lens, strict=True):
        nodes.update(path)
        own += length - (path[-1][2] if path else 0)
    return own + sum(end - begin for _, begin, end in nodes)


def make_case(
    name: str,
    heads: Heads,
    paths: Sequence[Sequence[Segment]],
    seq_lens: Sequence[int],
    *,
    head_dim: int = HEAD_DIM,
    kv_dtype: str = "bf16",
    detail: str = "",
) -> Case:
    """A case with its requests put in depth-first order, as cascade attention needs them."""
    order = sorted(range(len(paths)), key=lambda request: [node for node, _, _ in paths[request]])
    return Case(
        name, heads, tuple(tuple(paths[request]) for request in order), tuple(seq_lens[request] for request in order),
        head_dim, kv_dtype, detail,
    )  # fmt: skip
