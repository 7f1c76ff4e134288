"""Figures of the results of gpu_attention."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.kernel.gpu_drawn_report import family_of
from benchmarks.kernel.gpu_report import (
    MULTI_LEVEL,
    OURS,
    OURS_TOO,
    best_of,
    fraction_of_limit,
    kv_dtype,
    pat_number,
    ratio,
)

OURS_COLOUR, BASELINE, LIMIT = "#2b8cbe", "#bdbdbd", "#404040"


def draw_pat(result: dict[str, Any]) -> Figure | None:
    """Times on PAT's trees by head setting, cold L2: ours, the best baseline and the limit. None without such rows."""
    rows = [row for row in result["rows"] if pat_number(row) and OURS in row["baselines"]]
    settings = list(dict.fromkeys(row["heads"] for row in rows))
    if not rows:
        return None
    figure = Figure(figsize=(11, 1.4 + 2.2 * len(settings)), layout="constrained")
    every_axes = figure.subplots(len(settings), 1, sharex=True, squeeze=False)[:, 0]
    for axes, heads in zip(every_axes, settings, strict=True):
        panel = [row for row in rows if row["heads"] == heads and "cold_us" in row["baselines"][OURS]]
        for row in panel:
            place, ours, best = pat_number(row), row["baselines"][OURS]["cold_us"], best_of(row)
            axes.bar(place - 0.2, ours, width=0.38, color=OURS_COLOUR, label="prefixpack")
            if best:
                axes.bar(place + 0.2, best[1], width=0.38, color=BASELINE, label="best baseline")
            axes.hlines(
                row["limits"]["limit_us"], place - 0.42, place + 0.42, color=LIMIT, linewidth=1.2, label="limit"
            )
            gain, share = ratio(row), fraction_of_limit(row)
            note = "\n".join(([] if gain is None else [f"{gain:.1f}x"]) + ([] if share is None else [f"{share:.0%}"]))
            top = max(ours, best[1] if best else 0)
            axes.annotate(note, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=6.5)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(top=axes.get_ylim()[1] * 2.5)
        axes.set_ylabel("us", fontsize=9)
        axes.set_title(f"{heads} heads", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    handles, labels = every_axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    every_axes[0].legend(unique.values(), unique.keys(), fontsize=8, frameon=False, ncols=3, loc="lower right",
                         bbox_to_anchor=(1, 1))  # fmt: skip
    every_axes[-1].set_xticks(sorted({pat_number(row) for row in rows}))
    every_axes[-1].set_xlabel(
        "tree of PAT's Figure 9 (above: gain over the best baseline, share of the limit)", fontsize=9
    )
    machine = result["machine"]
    types = "bf16" if kv_dtype(result) == "bf16" else f"bf16 over KV in {kv_dtype(result)}"
    figure.suptitle(
        f"{machine['gpu']}: one decode step of one layer, {types}, page size 1, CUDA graph, cold L2; "
        f"copies move {machine['copy_bandwidth'] / 1e12:.2f} TB/s",
        fontsize=9, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def draw_gains(result: dict[str, Any]) -> Figure:
    """Gain of each drawn batch over how often it reads a position: against all baselines, and per-request ones."""
    rows = [row for row in result["rows"] if row["kv_dtype"] == "bf16"]
    per_request = {name for row in rows for name in row["baselines"]} - {*MULTI_LEVEL, OURS, OURS_TOO}
    panels = {"kernels that read request by request": per_request, "all baselines": None}
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    for axes, (title, baselines) in zip(figure.subplots(1, 2, sharex=True, sharey=True), panels.items(), strict=True):
        for number, family in enumerate(dict.fromkeys(family_of(row) for row in rows)):
            part = [row for row in rows if family_of(row) == family]
            label = {"committed": "fixed trees", "ragged": "nothing shared"}.get(family, family.replace("_", " "))
            places = [(row["reuse"], gain) for row in part if (gain := ratio(row, baselines)) is not None]
            axes.scatter(*zip(*places, strict=True), s=14, color=f"C{number}", alpha=0.8, label=label)
        axes.axhline(1, color=LIMIT, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.set_title(f"against the fastest of {title}", fontsize=10, loc="left")
        axes.set_xlabel("sharing: KV positions of all requests / distinct positions", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.axes[0].set_ylabel("gain of one layer's attention", fontsize=9)
    figure.axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    machine = result["machine"]
    figure.suptitle(
        f"{machine['gpu']}: {len(rows)} drawn batches, seed {result['seed']}, bf16, cold L2",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    return figure
