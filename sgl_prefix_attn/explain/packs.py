"""The packs of a plan: queries that read a KV range together, with their tiles and splits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.planner import KV_BEGIN, KV_END, OPEN_END, QUERY_BEGIN, QUERY_COUNT, REQUEST, TILE_ROWS, Plan

PRIVATE = -1


@dataclass(frozen=True)
class Pack:
    """Queries that read one KV range together.

    node: the deepest forest node of the range, or PRIVATE when the range ends in one request's own positions.
    query_begin, query_end: entries of the plan's query arrays. row_tiles: tiles side by side over the queries, each
    of which reads the range. items: work items, KV splits included.
    """

    node: int
    query_begin: int
    query_end: int
    kv_begin: int
    kv_end: int
    row_tiles: int
    items: int

    @property
    def queries(self) -> int:
        return self.query_end - self.query_begin

    @property
    def kv_tokens(self) -> int:
        return self.kv_end - self.kv_begin


@dataclass(frozen=True)
class ItemClass:
    """Work items of one kind and tile size taken together.

    kind: "shared" when the item's range ends in a shared node, else "private". kv_tokens: positions they read, once an
    item. rows_filled: share of their tiles' rows that hold a query row.
    """

    kind: str
    tile_rows: int
    items: int
    kv_tokens: int
    rows_filled: float


@dataclass
class _Strip:
    """Consecutive work items of one row tile over a pack's KV range."""

    query_begin: int
    query_count: int
    request: int
    kv_begin: int
    kv_end: int
    items: int = 1


def item_ends(plan: Plan, seq_lens: Int64Array) -> Int64Array:
    """KV end of each work item, open ends filled in: one past the position of the item's last query. int64 [items]"""
    items = plan.items
    last = items[:, QUERY_BEGIN] + items[:, QUERY_COUNT] - 1
    open_ends = seq_lens[plan.query_request[last]] - plan.query_back[last]
    return np.where(items[:, KV_END] == OPEN_END, open_ends, items[:, KV_END])


def packs_of(plan: Plan, forest: PrefixForest, seq_lens: Int64Array) -> list[Pack]:
    """Packs by first query, then KV position."""
    paths = _RequestPaths(forest)
    groups: dict[tuple[int, int], list[_Strip]] = defaultdict(list)
    for strip in _strips(plan, paths, seq_lens):
        node = paths.node_at(strip.request, strip.kv_end - 1)
        groups[node, strip.request if node == PRIVATE else PRIVATE].append(strip)
    packs = [
        Pack(
            node=node,
            query_begin=min(strip.query_begin for strip in strips),
            query_end=max(strip.query_begin + strip.query_count for strip in strips),
            kv_begin=min(strip.kv_begin for strip in strips),
            kv_end=max(strip.kv_end for strip in strips),
            row_tiles=len({strip.query_begin for strip in strips}),
            items=sum(strip.items for strip in strips),
        )
        for (node, _), strips in groups.items()
    ]
    return sorted(packs, key=lambda pack: (pack.query_begin, pack.kv_begin))


def item_classes(plan: Plan, forest: PrefixForest, seq_lens: Int64Array, group: int) -> list[ItemClass]:
    """Classes of the plan's items, shared ones first, large tiles first. group: query heads a KV head."""
    paths = _RequestPaths(forest)
    members: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    ends = item_ends(plan, seq_lens).tolist()
    for item, kv_end in zip(plan.items.tolist(), ends, strict=True):
        kind = "private" if paths.node_at(item[REQUEST], kv_end - 1) == PRIVATE else "shared"
        members[kind, item[TILE_ROWS]].append((item[QUERY_COUNT], kv_end - item[KV_BEGIN]))
    return [
        ItemClass(
            kind=kind,
            tile_rows=tile_rows,
            items=len(items),
            kv_tokens=sum(tokens for _, tokens in items),
            rows_filled=sum(queries for queries, _ in items) * group / (tile_rows * len(items)),
        )
        for (kind, tile_rows), items in sorted(
            members.items(), key=lambda entry: (entry[0][0] != "shared", -entry[0][1])
        )
    ]


class _RequestPaths:
    """Nodes of each request from the root down."""

    def __init__(self, forest: PrefixForest) -> None:
        self._nodes: list[list[tuple[int, int, int]]] = [[] for _ in range(forest.num_requests)]
        for node in range(forest.num_nodes):  # preorder: ancestors first
            segment = (node, int(forest.node_begin[node]), int(forest.node_end[node]))
            for request in forest.order[forest.node_first[node] : forest.node_last[node]].tolist():
                self._nodes[request].append(segment)

    def node_at(self, request: int, position: int) -> int:
        """Node of the request that holds the position, or PRIVATE."""
        for node, begin, end in self._nodes[request]:
            if begin <= position < end:
                return node
        return PRIVATE

    def is_node_end(self, request: int, position: int) -> bool:
        """Whether a node of the request ends at the position."""
        return any(position == end for _, _, end in self._nodes[request])


def _row_tiles(rows: list[list[int]]) -> dict[tuple[int, ...], int]:
    """Row tiles of the pack that each item belongs to, by the item's first query and KV range.

    Tiles of a pack read the same range, or one with the same open end, and follow each other, and all but the last hold
    as many queries. rows: items as (query_begin, query_count, request, kv_begin, kv_end, ...), ascending.
    """
    packs: dict[tuple[int, ...], list[list[list[int]]]] = defaultdict(list)
    for row in rows:
        found = packs[tuple(row[REQUEST : KV_END + 1])]
        if found and found[-1][-1][0] + found[-1][-1][1] == row[0] and row[1] <= found[-1][-1][1]:
            found[-1].append(row)
        else:
            found.append([row])
    return {(row[0], *kv_range): len(tiles) for kv_range, found in packs.items() for tiles in found for row in tiles}


def _strips(plan: Plan, paths: _RequestPaths, seq_lens: Int64Array) -> list[_Strip]:
    rows = np.column_stack([plan.items[:, : KV_END + 1], item_ends(plan, seq_lens)])
    rows = rows[np.lexsort((rows[:, KV_BEGIN], rows[:, QUERY_COUNT], rows[:, QUERY_BEGIN]))]
    row_tiles = _row_tiles(rows.tolist())
    strips: list[_Strip] = []
    previous_tiles = 0
    for query_begin, query_count, request, kv_begin, range_end, kv_end in rows.tolist():
        tiles = row_tiles[query_begin, request, kv_begin, range_end]
        above = strips[-1] if strips else None
        if (
            above is not None
            and (above.query_begin, above.query_count, above.kv_end) == (query_begin, query_count, kv_begin)
            # A row tile of a wide pack can hold the same queries as a narrower pack below it.
            and (tiles == previous_tiles or not paths.is_node_end(request, kv_begin))
        ):
            above.kv_end = kv_end
            above.items += 1
        else:
            strips.append(_Strip(query_begin, query_count, request, kv_begin, kv_end))
        previous_tiles = tiles
    return strips
