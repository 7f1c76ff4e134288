"""Cases from a seed: `draw` makes one of a family, `draw_set` samples families, heads and types evenly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.workloads.case import HEAD_DIM, KV_BYTES, Case, Heads, Path, make_case, unique_tokens
from benchmarks.workloads.committed import catalogue
from benchmarks.workloads.families import FAMILIES, MOST_REQUESTS
from benchmarks.workloads.lengths import Batch, Rng

MIXTURE, COMMITTED = "mixture", "committed"
ALL_FAMILIES = (*FAMILIES, MIXTURE, COMMITTED)
# The models' own settings, then what tensor-parallel ranks see.
ALL_HEADS: tuple[Heads, ...] = (
    (32, 32), (32, 8), (64, 8), (40, 8), (28, 4), (32, 4), (64, 4), (16, 2), (8, 1), (4, 1),
)  # fmt: skip
# (head_dim, KV type) and their share of a set.
SHAPES = (((128, "bf16"), 0.7), ((64, "bf16"), 0.08), ((256, "bf16"), 0.08), ((128, "fp8_e4m3"), 0.14))
MOST_UNIQUE_BYTES = 16e9
MOST_READ_BYTES = 60e9  # of all requests by themselves: what a baseline without sharing reads
USUAL_SET = 300


def draw(
    seed: int | Sequence[int],
    family: str,
    heads: Heads,
    head_dim: int = HEAD_DIM,
    kv_dtype: str = "bf16",
    *,
    name: str | None = None,
    most_unique_bytes: float = MOST_UNIQUE_BYTES,
    most_read_bytes: float = MOST_READ_BYTES,
) -> Case:
    """A case of a family; the same arguments give the same case.

    Args:
        seed: of numpy's default generator.
        family: one of ALL_FAMILIES.
        heads: (query heads, KV heads).
        kv_dtype: a key of KV_BYTES.
        name: of the case; None: `family/seed`.
        most_unique_bytes: of K and V. Requests at the end are left out, at least one stays.
        most_read_bytes: of K and V where every request reads its own; likewise.

    Raises:
        ValueError: unknown family or KV type.
    """
    if kv_dtype not in KV_BYTES:
        raise ValueError(f"kv_dtype {kv_dtype!r}: expected one of {', '.join(KV_BYTES)}")
    rng = np.random.default_rng(seed)
    batch = Batch()
    if family == COMMITTED:
        detail = add_committed(rng, batch)
    elif family == MIXTURE:
        detail = add_mixture(rng, batch)
    elif family in FAMILIES:
        detail = FAMILIES[family](rng, batch)
    else:
        raise ValueError(f"family {family!r}: expected one of {', '.join(ALL_FAMILIES)}")
    position = 2 * heads[1] * head_dim * KV_BYTES[kv_dtype]
    kept = fitting(batch.paths, batch.seq_lens, most_unique_bytes / position, most_read_bytes / position)
    name = f"{family}/{seed}" if name is None else name
    return make_case(
        name, heads, batch.paths[:kept], batch.seq_lens[:kept], head_dim=head_dim, kv_dtype=kv_dtype, detail=detail
    )


def fitting(paths: list[Path], seq_lens: list[int], most_unique: float, most_read: float) -> int:
    """How many requests, from the first, stay below most_unique distinct tokens and most_read tokens by request."""
    low, high = 1, min(len(paths), MOST_REQUESTS)
    while low < high:
        middle = (low + high + 1) // 2
        lens = seq_lens[:middle]
        fits = sum(lens) <= most_read and unique_tokens(paths[:middle], lens) <= most_unique
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def add_committed(rng: Rng, batch: Batch) -> str:
    """One of the batches with committed times, at the heads that were drawn."""
    entries = list(catalogue())
    name, _, build = entries[int(rng.integers(len(entries)))]
    batch.paths, batch.seq_lens = build()
    return name


def add_mixture(rng: Rng, batch: Batch) -> str:
    """Parts of two to four families in one batch; they share nothing with each other."""
    chosen = rng.choice(list(FAMILIES), size=int(rng.integers(2, 5)), replace=False).tolist()
    details = []
    for family in chosen:
        part = Batch()
        detail = FAMILIES[family](rng, part)
        first = len(part.paths) if rng.random() < 0.3 else max(1, int(len(part.paths) * rng.uniform(0.1, 0.6)))
        kept = min(first, MOST_REQUESTS // len(chosen))
        offset = 1 + max((node for path in batch.paths for node, _, _ in path), default=-1)
        batch.paths += [[(node + offset, begin, end) for node, begin, end in path] for path in part.paths[:kept]]
        batch.seq_lens += part.seq_lens[:kept]
        details.append(f"{kept} of {family} ({detail})")
    return "; ".join(details)


def draw_set(seed: int, count: int = USUAL_SET, families: Sequence[str] = ALL_FAMILIES) -> list[Case]:
    """`count` cases. Families and heads take turns, so that every prefix of the list samples all of them evenly.

    Args:
        seed: 0 or more.
        families: to take turns; a case does not depend on which others are drawn.
    """
    shapes = [shape for shape, _ in SHAPES]
    cases = []
    for index in range(count):
        turn = index // len(ALL_FAMILIES)
        family = ALL_FAMILIES[index % len(ALL_FAMILIES)]
        # Turns are as many as head settings; in these every family meets every setting once.
        heads = ALL_HEADS[(index % len(ALL_FAMILIES) + turn) % len(ALL_HEADS)]
        rng = np.random.default_rng([seed, index])
        head_dim, kv_dtype = shapes[int(rng.choice(len(shapes), p=[share for _, share in SHAPES]))]
        if family in families:
            name = f"{family}/{seed}.{index:03}"
            cases.append(draw([seed, index, 1], family, heads, head_dim, kv_dtype, name=name))
    return cases
