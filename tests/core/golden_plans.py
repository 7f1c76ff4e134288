"""Digests of forests and plans over fixed groups of batches: PAT's trees, the committed cases, random forests.

After a deliberate change of plans, `python -m tests.core.golden_plans` records them. Inputs and forests stay.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from benchmarks.kernel.gpu_cases import select
from benchmarks.workloads.case import HEAD_DIM
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from tests.core import plan_checks
from tests.core.forests import random_paths

DIGESTS = FilePath(__file__).parent / "data" / "golden_plans.json"
GROUPS = ("pat", "committed", *(f"random{part}" for part in range(10)))
RANDOM_PER_GROUP = 1000

SHAPES = (*plan_checks.SHAPES, ModelShape(8, 1, 128, kv_bytes=1))
FOREST_FIELDS = (
    "order", "node_parent", "node_begin", "node_end", "node_first", "node_last", "node_request", "tail_begin",
    "tail_node",
)  # fmt: skip
PLAN_ARRAYS = (
    "query_token",
    "query_request",
    "query_back",
    "combine_query",
    "combine_offset",
    "combine_partial",
    "items",
)
PLAN_NUMBERS = (
    "num_requests", "num_queries", "num_partials", "kv_tokens_packed", "kv_tokens_per_request", "kv_tokens_unique",
    "mostly_narrow",
)  # fmt: skip
# Tokens by which all lengths grow before the second call: shows how long a plan is reused.
GROWTHS = (20, 50)


@dataclass(frozen=True)
class GoldenCase:
    shape: ModelShape
    device: DeviceModel
    paths: Sequence[Sequence[tuple[int, int, int]]]
    seq_lens: np.ndarray
    query_lens: np.ndarray | None


def cases_of(group: str) -> Iterator[GoldenCase]:
    """The batches of one of GROUPS, always the same."""
    if group.startswith("random"):
        first = int(group.removeprefix("random")) * RANDOM_PER_GROUP
        yield from (random_case(seed) for seed in range(first, first + RANDOM_PER_GROUP))
        return
    for case in select([], None):
        if case.name.startswith("pat/") == (group == "pat"):
            shape = ModelShape(*case.heads, HEAD_DIM)
            yield GoldenCase(shape, DeviceModel.gpu(132, group=shape.group), case.paths, case.lengths, None)


def random_case(seed: int) -> GoldenCase:
    """A small random batch with a shape and a device that its seed selects."""
    rng = np.random.default_rng(seed)
    new_tokens = (1, 1, 1, 40, 200)[seed % 5]
    tokens = (40, 300, 3000)[seed % 3]
    paths, seq_lens, query_lens = random_paths(
        rng, int(rng.integers(1, (6, 12, 24, 64)[seed % 4] + 1)), 1 + seed % 8, max_node_tokens=tokens,
        max_tail_tokens=tokens, max_new_tokens=new_tokens,
    )  # fmt: skip
    shape = SHAPES[seed % len(SHAPES)]
    devices = (
        DeviceModel.gpu(132, head_dim=shape.head_dim, group=shape.group),
        DeviceModel.gpu(4, head_dim=shape.head_dim, group=shape.group),
        DeviceModel.gpu(132, max_tile_rows=16),
        DeviceModel.cpu(1 + seed % 3),
    )
    device = devices[seed // len(SHAPES) % len(devices)]
    return GoldenCase(shape, device, paths, seq_lens, None if new_tokens == 1 else query_lens)


def digests_of(group: str) -> dict[str, str]:
    """SHA-256 of a group's inputs, forests and plans.

    The three are apart: other inputs mean another random generator, and plans may change where forests do not.
    """
    inputs, forests, plans = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for case in cases_of(group):
        new_tokens: Any = 1 if case.query_lens is None else case.query_lens
        prefix_lens = (case.seq_lens - new_tokens).tolist()
        inputs.update(repr([list(map(tuple, path)) for path in case.paths]).encode())
        _update(inputs, case.seq_lens, np.asarray(new_tokens))
        forest = PrefixForest.from_paths(case.paths, prefix_lens=prefix_lens)
        _update(forests, *(getattr(forest, name) for name in FOREST_FIELDS))
        planner = Planner(case.shape, case.device)
        plan = planner.plan(forest, case.seq_lens, case.query_lens)
        _update(plans, *(getattr(plan, name) for name in PLAN_ARRAYS))
        reused = [planner.plan(forest, case.seq_lens + growth) is plan for growth in GROWTHS]
        numbers = [*(int(getattr(plan, name)) for name in PLAN_NUMBERS), *reused]
        _update(plans, np.asarray(numbers))
    return {"inputs": inputs.hexdigest(), "forests": forests.hexdigest(), "plans": plans.hexdigest()}


def _update(digest: Any, *arrays: np.ndarray) -> None:
    for array in arrays:
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps({group: digests_of(group) for group in GROUPS}, indent=1) + "\n")
