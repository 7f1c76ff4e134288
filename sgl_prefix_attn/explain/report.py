"""Everything `explain` knows about one batch, as numbers. text.py, plot.py and --json only present it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from sgl_prefix_attn.explain.balance import Schedule, partial_bytes, simulate
from sgl_prefix_attn.explain.batch import BatchDescription, InputError
from sgl_prefix_attn.explain.packs import ItemClass, Pack, item_classes, packs_of
from sgl_prefix_attn.explain.prediction import Gain, Machine, predicted_gain
from sgl_prefix_attn.routing.profile_store import ProfileStore


@dataclass(frozen=True)
class Explanation:
    """A batch, its forest and its plan.

    Attributes:
        schedule: of the plan by the planner's costs.
        gain: over the stock backend; a text says why there is no prediction.
        plan_seconds: host time of the plan.
    """

    batch: BatchDescription
    shape: ModelShape
    machine: Machine
    forest: PrefixForest
    plan: Plan
    packs: list[Pack]
    item_classes: list[ItemClass]
    schedule: Schedule
    gain: Gain | str
    plan_seconds: float

    @property
    def device(self) -> DeviceModel:
        """What the plan is for."""
        return self.machine.model

    @property
    def seconds(self) -> float:
        """The time of one layer's attention: by the profile, without one by the planner's costs."""
        return self.schedule.seconds if isinstance(self.gain, str) else self.gain.packed_us / 1e6

    @property
    def token_bytes(self) -> int:
        """Bytes of one KV position in one layer: K and V of every KV head."""
        return 2 * self.shape.kv_heads * self.shape.head_dim * self.shape.kv_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes per layer to write and read back the partial results."""
        return partial_bytes(self.plan.num_partials, self.shape)

    @property
    def kv_splits(self) -> int:
        """Work items that split-KV adds: items minus one for each row tile of each pack."""
        return sum(pack.items - pack.row_tiles for pack in self.packs)

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
            "packs": [dataclasses.asdict(pack) for pack in self.packs],
            "work_items": len(plan.items),
            "kv_splits": self.kv_splits,
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
            "worker_seconds": self.schedule.worker_seconds.tolist(),
            "max_over_mean": self.schedule.max_over_mean,
            "time": {"seconds": self.seconds, "by": "planner" if isinstance(self.gain, str) else "profile"},
            "gain": {"none": self.gain} if isinstance(self.gain, str) else self.gain.to_json(),
            "plan_seconds": self.plan_seconds,
        }


def explain(batch: BatchDescription, shape: ModelShape, machine: Machine, store: ProfileStore) -> Explanation:
    """Plans the batch as a server would.

    Args:
        store: profiles to predict the gain by.

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
    schedule = simulate(plan, batch.seq_lens, shape, machine.model)
    return Explanation(
        batch=batch,
        shape=shape,
        machine=machine,
        forest=forest,
        plan=plan,
        packs=packs_of(plan, forest, batch.seq_lens),
        item_classes=item_classes(plan, forest, batch.seq_lens, shape.q_heads // shape.kv_heads),
        schedule=schedule,
        gain=predicted_gain(forest, batch.seq_lens, batch.is_decode, machine, store),
        plan_seconds=seconds,
    )
