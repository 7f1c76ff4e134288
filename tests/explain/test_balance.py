"""The simulated queue: a free worker takes the next work item, and its cost is the planner's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.explain.balance import item_seconds

# One KV head, 128 bytes a token: 64 for K and 64 for V.
SHAPE = ModelShape(q_heads=2, kv_heads=1, head_dim=32)
Item = tuple[int, int, int, int, int, int, int]


def plan(items: list[Item]) -> Any:
    """What is read of a plan."""
    queries = np.arange(max(item[0] + item[1] for item in items), dtype=np.int32)
    return SimpleNamespace(items=np.array(items, np.int32), query_request=queries, query_back=0 * queries)


def device(**changes: object) -> DeviceModel:
    fields = {"workers": 2, "bandwidth": 256.0, "flops": 1e12, "item_overhead": 0.5, "reread": 0.25, "tile_rows": (16,)}
    return DeviceModel(**(fields | changes))  # type: ignore[arg-type]


ITEM = (0, 1, 0, 0, 10, -1, 16)
NARROW = {"tile_rows": (16, 32), "narrow_rows": 16, "narrow_parts": 2, "narrow_reread": 0.5}


@pytest.mark.parametrize(
    ("items", "changes", "expected"),
    [
        pytest.param([ITEM], {}, [0.5 + 10 * 128 / 128], id="overhead and a worker's share of the bandwidth"),
        pytest.param([(0, 1, 0, 90, -1, -1, 16)], {}, [10.5], id="an open item ends with its query"),
        # 16 padded rows x 10 tokens x 4 x 32 operations on half of 1024 operations a second: 40 s; reading: 10 s.
        pytest.param([ITEM], {"flops": 1024.0}, [0.5 + 40], id="arithmetic slower than reading"),
        pytest.param([ITEM], {"flops": 1024.0, "overlap": 0.0}, [0.5 + 10 + 40], id="no overlap"),
        pytest.param([ITEM], {"flops": 1024.0, "overlap": 0.75}, [0.5 + 40 + 2.5], id="partial overlap"),
        pytest.param(
            [(0, 3, 0, 0, 10, 7, 16)], {}, [10.5 + 3 * 2 * (32 * 4 + 4) / 128], id="partial results of three queries"
        ),
        pytest.param(
            [(0, 4, 0, 0, 10, -1, 16), (4, 4, 0, 0, 10, -1, 16)],
            {},
            [10.5, 0.5 + 2.5],
            id="a row tile after its sibling",
        ),
        pytest.param(
            [(0, 4, 0, 0, 10, -1, 16), (4, 4, 0, 10, 20, -1, 16)], {}, [10.5, 10.5], id="a row tile of another range"
        ),
        pytest.param([ITEM, (1, 1, 1, 0, 10, -1, 32)], NARROW, [10 + 5, 10.5], id="narrow item of two units"),
    ],
)
def test_seconds_of_an_item(items: list[Item], changes: dict[str, object], expected: list[float]) -> None:
    seconds = item_seconds(plan(items), np.full(8, 100, np.int64), SHAPE, device(**changes))
    assert seconds.tolist() == pytest.approx(expected)
