"""An explanation as a picture: packs, KV reads, and the load of the workers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from sgl_prefix_attn.core.planner import KV_BEGIN, QUERY_BEGIN, QUERY_COUNT
from sgl_prefix_attn.explain.batch import InputError
from sgl_prefix_attn.explain.packs import PRIVATE, Pack, item_ends
from sgl_prefix_attn.explain.report import Explanation
from sgl_prefix_attn.explain.text import time_lines

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise InputError("--plot needs matplotlib: pip install 'sgl-prefix-attn[plot]'") from error

_FORMATS = (".png", ".svg", ".pdf")
_PRIVATE_COLOUR = "#dcdcdc"
_PACKED_COLOUR, _PER_REQUEST_COLOUR, _LIMIT_COLOUR = "#2b8cbe", "#b5b5b5", "#a8ddb5"
_READERS_MAP = matplotlib.colormaps["GnBu"]
_FIGURE_INCHES, _DPI = (12.0, 6.4), 140
_HEADLINE_CHARACTERS = 140  # of a line
_MIN_OUTLINED_PIXELS = 5.0  # height below which an outline would hide the colour
_MOST_COLOUR_TICKS = 8
_Polygon = list[tuple[float, float]]


def draw(explanation: Explanation, path: str) -> None:
    """Writes the picture. Raises InputError for another file type than .png, .svg, .pdf or a missing folder."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise InputError(f"--plot {path}: expected a file name that ends in {', '.join(_FORMATS)}")
    figure = Figure(figsize=_FIGURE_INCHES, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.6, 1), height_ratios=(1, 1.5))
    _draw_packs(figure, figure.add_subplot(grid[:, 0]), explanation)
    _draw_reads(figure.add_subplot(grid[0, 1]), explanation)
    _draw_balance(figure.add_subplot(grid[1, 1]), explanation)
    figure.suptitle(_headline(explanation), fontsize=11, x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise InputError(f"--plot {path}: {error.strerror}") from error


def _headline(explanation: Explanation) -> str:
    plan = explanation.plan
    fewer, limit = (plan.kv_tokens_per_request / n for n in (plan.kv_tokens_packed, plan.kv_tokens_unique))
    return (
        f"{explanation.batch.title}\n{explanation.batch.num_requests:,} requests, {len(explanation.packs):,} packs, "
        f"{len(plan.items):,} work items; {fewer:.2f}x fewer KV reads than per request, limit {limit:.2f}x\n"
        + "\n".join(textwrap.fill(line, _HEADLINE_CHARACTERS) for line in time_lines(explanation))
    )


def _draw_packs(figure: Figure, axes: Axes, explanation: Explanation) -> None:
    """Packs as rectangles over KV position and query, coloured by their number of queries."""
    plan = explanation.plan
    query_pixels = 0.85 * _FIGURE_INCHES[1] * _DPI / plan.num_queries
    shared = [pack for pack in explanation.packs if pack.node != PRIVATE]
    private = [pack for pack in explanation.packs if pack.node == PRIVATE]
    axes.add_collection(
        PolyCollection(
            [_corners(pack) for pack in private],
            facecolors=_PRIVATE_COLOUR,
            edgecolors="white",
            linewidths=[_outline(query_pixels * pack.queries) for pack in private],
        )
    )
    if shared:
        readers = sorted({pack.queries for pack in shared})
        coloured = PolyCollection(
            [_corners(pack) for pack in shared],
            array=np.array([pack.queries for pack in shared]),
            cmap=_READERS_MAP,
            norm=LogNorm(0.7, readers[-1] * 1.3),
            edgecolors="white",
            linewidths=[_outline(query_pixels * pack.queries) for pack in shared],
        )
        axes.add_collection(coloured)
        bar = figure.colorbar(coloured, ax=axes, pad=0.01, aspect=40)
        step = -(-len(readers) // _MOST_COLOUR_TICKS)
        bar.set_ticks(readers[::-1][::step], labels=[f"{count:,}" for count in readers[::-1][::step]])
        bar.minorticks_off()
        bar.set_label("queries that read the pack's KV together", fontsize=9)
    _draw_cuts(axes, explanation, query_pixels)
    _draw_nodes(axes, explanation, query_pixels)
    axes.set_xlim(0, int(explanation.batch.seq_lens.max()))
    axes.set_ylim(plan.num_queries, 0)
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("KV position", fontsize=9)
    axes.set_ylabel("query token, in packed order", fontsize=9)
    _strip(axes)
    axes.set_title(
        "Packs in colour, private KV grey; black: forest nodes, dotted: borders of work items", fontsize=10, loc="left"
    )


def _draw_cuts(axes: Axes, explanation: Explanation, query_pixels: float) -> None:
    """Borders between the work items of one pack: KV splits and row tiles."""
    plan = explanation.plan
    whole = {_edges(pack) for pack in explanation.packs}
    begins = plan.items[:, QUERY_BEGIN]
    ends = begins + plan.items[:, QUERY_COUNT]
    kv_ends = item_ends(plan, explanation.batch.seq_lens)
    shared = plan.query_request[begins] != plan.query_request[ends - 1]
    most = max(pack.queries for pack in explanation.packs)
    parts, colours = [], []
    items = np.column_stack([plan.items[:, KV_BEGIN], kv_ends, begins, ends])
    for edges, is_shared in zip(items.tolist(), shared.tolist(), strict=True):
        queries = edges[3] - edges[2]
        if tuple(edges) not in whole and query_pixels * queries >= _MIN_OUTLINED_PIXELS:
            parts.append(_rectangle(*edges))
            colours.append("white" if is_shared and queries**2 > most else "#404040")  # to stand out from the fill
    axes.add_collection(
        PolyCollection(parts, facecolors="none", edgecolors=colours, linewidths=0.8, linestyles=(0, (1, 1.5)))
    )


def _draw_nodes(axes: Axes, explanation: Explanation, query_pixels: float) -> None:
    """Outlines of the forest's nodes, to show which of them a pack joins."""
    forest, requests = explanation.forest, explanation.plan.query_request
    _, first_query, queries = np.unique(requests, return_index=True, return_counts=True)
    outlines = []
    for node in range(forest.num_nodes):
        members = forest.order[forest.node_first[node] : forest.node_last[node]]
        first = int(first_query[members].min())
        last = first + int(queries[members].sum())  # the requests of a node are neighbours in packed order
        if query_pixels * (last - first) >= 2 * _MIN_OUTLINED_PIXELS:
            outlines.append(_rectangle(int(forest.node_begin[node]), int(forest.node_end[node]), first, last))
    axes.add_collection(PolyCollection(outlines, facecolors="none", edgecolors="black", linewidths=0.8))


def _draw_reads(axes: Axes, explanation: Explanation) -> None:
    plan = explanation.plan
    tokens = (plan.kv_tokens_per_request, plan.kv_tokens_packed, plan.kv_tokens_unique)
    megabytes = [count * explanation.token_bytes / 1e6 for count in tokens]
    names = ("per request", "packed", "limit")
    axes.barh(names, megabytes, color=(_PER_REQUEST_COLOUR, _PACKED_COLOUR, _LIMIT_COLOUR), height=0.65)
    for row, value in enumerate(megabytes):
        axes.annotate(f" {value:,.1f}", (value, row), va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(megabytes) * 1.25)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.set_xlabel("MB of KV read in a layer", fontsize=9)
    _strip(axes)
    axes.set_title("KV reads", fontsize=10, loc="left")


def _draw_balance(axes: Axes, explanation: Explanation) -> None:
    """Busy time of each worker over the mean. The planner's costs give the shares only; the time is in the headline."""
    schedule = explanation.schedule
    loads = np.sort(schedule.worker_seconds)[::-1] / schedule.worker_seconds.mean()
    width = 0.9 if len(loads) <= 64 else 1.0
    axes.bar(np.arange(len(loads)), loads, width=width, color=_PACKED_COLOUR)
    axes.axhline(1.0, color="black", linewidth=0.7, linestyle="--")
    axes.set_xlabel(f"worker, busiest first (of {len(loads)})", fontsize=9)
    axes.set_ylabel("cost / mean", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylim(0, schedule.max_over_mean * 1.1)
    _strip(axes)
    axes.set_title(f"Balance by cost: max / mean {schedule.max_over_mean:.2f}", fontsize=10, loc="left")


def _edges(pack: Pack) -> tuple[int, int, int, int]:
    return pack.kv_begin, pack.kv_end, pack.query_begin, pack.query_end


def _corners(pack: Pack) -> _Polygon:
    return _rectangle(*_edges(pack))


def _rectangle(x0: float, x1: float, y0: float, y1: float) -> _Polygon:
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _outline(pixels: float) -> float:
    return 0.9 if pixels >= _MIN_OUTLINED_PIXELS else 0.0


def _strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _thousands(value: float, _position: int) -> str:
    return f"{value:,g}"
