"""Everything `explain` knows about one batch, as numbers. text.py and --json only present it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import (
    KV_BEGIN,
    KV_END,
    OPEN_END,
    QUERY_BEGIN,
    QUERY_COUNT,
    TILE_ROWS,
    DeviceModel,
    ModelShape,
    Plan,
    Planner,
)
from sgl_prefix_attn.explain.batch import BatchDescription, InputError
from sgl_prefix_attn.explain.route import Machine, StepRoute, route_of
from sgl_prefix_attn.routing.features import token_bytes


@dataclass(frozen=True)
class ItemClass:
    """Work items of one kind and tile size taken together.

    Attributes:
        kind: "shared" if several requests read the item's range, else "private".
        kv_tokens: positions that the items read, once an item.
        rows_filled: share of their tiles' rows that hold a query row.
    """

    kind: str
    tile_rows: int
    items: int
    kv_tokens: int
    rows_filled: float


@dataclass(frozen=True)
class Explanation:
    """A batch, its forest and its plan.

    Attributes:
        route: of the step; a text says why there is none.
        plan_seconds: host time of the plan.
    """

    batch: BatchDescription
    shape: ModelShape
    machine: Machine
    forest: PrefixForest
    plan: Plan
    item_classes: list[ItemClass]
    route: StepRoute | str
    plan_seconds: float

    @property
    def device(self) -> DeviceModel:
        """What the plan is for."""
        return self.machine.model

    @property
    def token_bytes(self) -> int:
        """Bytes of one KV position in one layer: K and V of every KV head."""
        return token_bytes(self.shape)

    @property
    def floor_seconds(self) -> float | None:
        """Seconds in which the memory's bandwidth moves the distinct KV of a layer; None: it is not known."""
        bandwidth = self.machine.bandwidth
        return self.plan.kv_tokens_unique * self.token_bytes / bandwidth if bandwidth else None

    @property
    def partial_bytes(self) -> int:
        """Bytes per layer to write and read back the partial results: of a query head an output and an fp32 lse."""
        shape = self.shape
        return 2 * self.plan.num_partials * shape.q_heads * (shape.head_dim * shape.partial_bytes + 4)

    @property
    def shared_share(self) -> float:
        """Share of the requests' KV positions that lie in nodes at least two of them read."""
        forest = self.forest
        readers = forest.node_last.astype(np.int64) - forest.node_first
        shared = int(((forest.node_end.astype(np.int64) - forest.node_begin) * readers).sum())
        return shared / int(self.batch.seq_lens.sum())

    def to_json(self) -> dict[str, Any]:
        """Plain values, counts in tokens, bytes and seconds as the names say, for one layer."""
        plan, forest = self.plan, self.forest
        return {
            "title": self.batch.title,
            "requests": self.batch.num_requests,
            "queries": plan.num_queries,
            "shape": dataclasses.asdict(self.shape),
            "device": dataclasses.asdict(self.device),
            "forest": {
                "order": forest.order.tolist(),
                "parent": forest.node_parent.tolist(),
                "begin": forest.node_begin.tolist(),
                "end": forest.node_end.tolist(),
                "first": forest.node_first.tolist(),
                "last": forest.node_last.tolist(),
                "tail_begin": forest.tail_begin.tolist(),
                "shared_share": self.shared_share,
            },
            "work_items": len(plan.items),
            "item_classes": [dataclasses.asdict(item_class) for item_class in self.item_classes],
            "kv_tokens": {
                "packed": plan.kv_tokens_packed,
                "per_request": plan.kv_tokens_per_request,
                "limit": plan.kv_tokens_unique,
            },
            "kv_bytes": {
                "packed": plan.kv_tokens_packed * self.token_bytes,
                "per_request": plan.kv_tokens_per_request * self.token_bytes,
                "limit": plan.kv_tokens_unique * self.token_bytes,
            },
            "partial_bytes": self.partial_bytes,
            "floor_seconds": self.floor_seconds,
            "route": {"none": self.route} if isinstance(self.route, str) else self.route.to_json(),
            "plan_seconds": self.plan_seconds,
        }


def explain(batch: BatchDescription, shape: ModelShape, machine: Machine) -> Explanation:
    """Plans the batch as a server would.

    Raises:
        InputError: the batch's paths are not a forest, or the shape has no plan; the message names the batch.
    """
    prefix_lens = batch.seq_lens - batch.query_lens
    try:
        forest = PrefixForest.from_paths(batch.paths, prefix_lens=prefix_lens.tolist())
    except ValueError as error:
        raise InputError(f"{batch.title}: {error}") from error
    try:
        planner = Planner(shape, machine.model)
    except ValueError as error:
        raise InputError(str(error)) from error
    query_lens = None if batch.is_decode else batch.query_lens
    plan = planner.plan(forest, batch.seq_lens, query_lens)
    seconds = planner.plan_seconds
    return Explanation(
        batch=batch,
        shape=shape,
        machine=machine,
        forest=forest,
        plan=plan,
        item_classes=item_classes(plan, batch.seq_lens, shape.q_heads // shape.kv_heads),
        route=route_of(forest, batch.seq_lens, batch.is_decode, machine, shape),
        plan_seconds=seconds,
    )


def item_classes(plan: Plan, seq_lens: Int64Array, group: int) -> list[ItemClass]:
    """Classes of the plan's items, shared ones first, large tiles first. group: query heads a KV head."""
    items, requests = plan.items, plan.query_request
    first, queries = items[:, QUERY_BEGIN], items[:, QUERY_COUNT]
    last = first + queries - 1
    # An open end is one past the position of the item's last query.
    ends = np.where(items[:, KV_END] == OPEN_END, seq_lens[requests[last]] - plan.query_back[last], items[:, KV_END])
    private, rows, tokens = requests[first] == requests[last], items[:, TILE_ROWS], ends - items[:, KV_BEGIN]
    found = []
    for is_private, negative_rows in sorted(set(zip(private.tolist(), (-rows).tolist(), strict=True))):
        of = (private == is_private) & (rows == -negative_rows)
        count = int(of.sum())
        filled = int(queries[of].sum()) * group / (-negative_rows * count)
        kind = "private" if is_private else "shared"
        found.append(ItemClass(kind, -negative_rows, count, int(tokens[of].sum()), filled))
    return found
