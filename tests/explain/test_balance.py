"""The simulated queue: free workers take the next item; prices are the planner's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.explain.balance import item_seconds, partial_bytes, simulate
from sgl_prefix_attn.explain.batch import parse_tree

# One KV head, 128 bytes a token: 64 for K and 64 for V.
SHAPE = ModelShape(q_heads=2, kv_heads=1, head_dim=32)


def device(**changes: object) -> DeviceModel:
    fields = {"workers": 2, "bandwidth": 256.0, "flops": 1e12, "item_overhead": 0.5, "reread": 0.25, "tile_rows": (16,)}
    return DeviceModel(**(fields | changes))  # type: ignore[arg-type]


def plan(items: list[tuple[int, ...]], merges: int = 0) -> SimpleNamespace:
    queries = max(item[0] + item[1] for item in items)
    return SimpleNamespace(
        items=np.array(items, np.int32),
        query_request=np.arange(queries, dtype=np.int32),
        query_back=np.zeros(queries, np.int32),
        merge_offset=np.array([0, merges], np.int32),
    )


def seconds(items: list[tuple[int, ...]], **changes: object) -> list[float]:
    lens = np.full(8, 100, np.int64)
    return item_seconds(plan(items), lens, SHAPE, device(**changes)).tolist()  # type: ignore[arg-type]


def test_an_item_costs_its_overhead_and_its_reading_at_a_workers_share_of_the_bandwidth() -> None:
    assert seconds([(0, 1, 0, 0, 10, -1, 16)]) == [0.5 + 10 * 128 / 128]


def test_an_open_item_ends_with_its_query() -> None:
    assert seconds([(0, 1, 0, 90, -1, -1, 16)]) == seconds([(0, 1, 0, 0, 10, -1, 16)])


def test_arithmetic_decides_when_it_is_slower_than_reading() -> None:
    # 16 padded rows x 10 tokens x 4 x 32 operations on half of 1024 operations a second
    assert seconds([(0, 1, 0, 0, 10, -1, 16)], flops=1024.0) == [0.5 + 16 * 10 * 128 / 512]


def test_what_does_not_overlap_is_added() -> None:
    # Reading takes 10 seconds, arithmetic 40.
    item = [(0, 1, 0, 0, 10, -1, 16)]
    assert seconds(item, flops=1024.0, overlap=0.0) == [0.5 + 10 + 40]
    assert seconds(item, flops=1024.0, overlap=0.75) == [0.5 + 40 + 2.5]


def test_partials_are_written_once_for_each_query() -> None:
    without, having = seconds([(0, 3, 0, 0, 10, -1, 16)]), seconds([(0, 3, 0, 0, 10, 7, 16)])
    assert having[0] - without[0] == pytest.approx(3 * 2 * (32 * 4 + 4) / 128)


def test_a_row_tile_right_behind_its_sibling_reads_cheaper() -> None:
    first, second = seconds([(0, 4, 0, 0, 10, -1, 16), (4, 4, 0, 0, 10, -1, 16)])
    assert (first, second) == (10.5, 0.5 + 2.5)
    _, other_range = seconds([(0, 4, 0, 0, 10, -1, 16), (4, 4, 0, 10, 20, -1, 16)])
    assert other_range == 10.5


def test_units_of_a_narrow_item_after_the_first_read_cheaper() -> None:
    narrow = {"tile_rows": (16, 32), "narrow_rows": 16, "narrow_units": 2, "narrow_reread": 0.5}
    assert seconds([(0, 1, 0, 0, 10, -1, 16), (1, 1, 1, 0, 10, -1, 32)], **narrow) == [10 + 5, 10.5]


def test_a_free_worker_takes_the_next_item() -> None:
    items = [(query, 1, query, 0, tokens, -1, 16) for query, tokens in enumerate((30, 20, 10, 10))]
    schedule = simulate(plan(items), np.full(4, 100, np.int64), SHAPE, device(item_overhead=0.0))  # type: ignore[arg-type]
    assert sorted(schedule.worker_seconds.tolist()) == [30.0, 40.0]
    assert schedule.max_over_mean == pytest.approx(40 / 35)


def test_every_kv_head_is_an_entry_of_its_own() -> None:
    shape = ModelShape(q_heads=4, kv_heads=2, head_dim=32)
    one = plan([(0, 1, 0, 0, 10, -1, 16)])
    schedule = simulate(one, np.full(1, 100, np.int64), shape, device(item_overhead=0.0))  # type: ignore[arg-type]
    assert schedule.worker_seconds.tolist() == [10.0, 10.0]


def test_merging_reads_the_partials_with_the_whole_bandwidth() -> None:
    items = [(0, 1, 0, 0, 10, 0, 16), (0, 1, 0, 10, 20, 1, 16)]
    schedule = simulate(plan(items, merges=2), np.full(1, 100, np.int64), SHAPE, device())  # type: ignore[arg-type]
    assert schedule.merge_seconds == pytest.approx(2 * 2 * (32 * 4 + 4) / 256)
    assert schedule.seconds == pytest.approx(schedule.worker_seconds.max() + schedule.merge_seconds)


def test_partial_bytes_are_written_and_read() -> None:
    assert partial_bytes(3, SHAPE) == 2 * 3 * 2 * (32 * 4 + 4)


def test_splits_balance_a_plan_of_one_long_request() -> None:
    batch = parse_tree("1/60000")
    shape, gpu = ModelShape(32, 8, 128), DeviceModel.gpu(132)
    made = Planner(shape, gpu).plan(PrefixForest.from_paths(batch.paths), batch.seq_lens)
    assert simulate(made, batch.seq_lens, shape, gpu).max_over_mean < 1.3
