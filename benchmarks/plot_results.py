"""Draws what is in benchmarks/results for the README.

    python benchmarks/plot_results.py [--results benchmarks/results] [--out docs/img]

cpu_packed.json becomes cpu_packed.png; plan_time.json and host_cost.json together become host_time.png;
gpu_attention.json becomes gpu_attention.png; gpu_drawn.json becomes gains.png;
the servers of the README become servers.png. What was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.doc_tables import gains_of_servers
from benchmarks.kernel.gpu_plot import draw_gains, draw_pat

ROOT = Path(__file__).resolve().parents[1]
PACKED, LIMIT, TARGET = "#2b8cbe", "#404040", "#d95f0e"
HEAD_COLOURS = ("#084081", "#2b8cbe", "#7bccc4", "#a8ddb5")
PLAN_TARGET_US = 100.0
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    packed, plan, host = (read(args.results / f"{name}.json") for name in ("cpu_packed", "plan_time", "host_cost"))
    gpu = read(args.results / "gpu_attention.json")
    if packed is None and plan is None and host is None and gpu is None:
        raise SystemExit(
            f"{args.results} has none of cpu_packed.json, plan_time.json, host_cost.json, gpu_attention.json"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    if packed is not None:
        save(draw_packed(packed), args.out / "cpu_packed.png")
    if plan is not None or host is not None:
        save(draw_host(plan, host), args.out / "host_time.png")
    figure = draw_pat(gpu) if gpu is not None else None
    if figure is not None:
        save(figure, args.out / "gpu_attention.png")
    save(draw_servers(), args.out / "servers.png")
    drawn = read(args.results / "gpu_drawn.json")
    if drawn is not None:
        save(draw_gains(drawn), args.out / "gains.png")


def read(path: Path) -> dict[str, Any] | None:
    """Content of a result file, None if it was not measured."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    print(f"written: {path}")


def draw_servers() -> Figure:
    """Gain of whole servers over the faster stock backend, one bar for each workload."""
    gains = gains_of_servers()
    figure = Figure(figsize=(11, 1.0 + 0.45 * len(gains)), layout="constrained")
    axes = figure.subplots()
    for place, (gain, stock) in enumerate(gains.values()):
        axes.barh(-place, gain, color=PACKED if gain > 1.02 else HEAD_COLOURS[3], height=0.6)
        note = f"{gain:.2f}x  over {stock}"
        axes.annotate(note, (gain, -place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks([-place for place in range(len(gains))], list(gains), fontsize=9)
    axes.axvline(1, color=LIMIT, linewidth=0.8)
    axes.set_xlim(right=1.25 * max(gain for gain, _ in gains.values()))
    axes.set_xlabel(
        "speed of prefixpack / speed of the fastest stock backend measured beside it (1: equal)", fontsize=9
    )
    machine = "NVIDIA H200, SGLang 0.5.16, Llama of the 8B shape, random weights, bf16"
    figure.suptitle(
        f"{machine}. Rollout: output tokens/s; others: 1 / time per output token", fontsize=9, x=0.01, ha="left"
    )
    strip(axes)
    return figure


def draw_packed(result: dict[str, Any]) -> Figure:
    """Speed-up over request-wise attention by tree, one panel for each dtype and head setting, and sharing's limit."""
    panels = {
        f"{dtype}, {heads}": rows
        for dtype in result["arguments"]["dtypes"]
        for heads, rows in by_heads([row for row in result["rows"] if row["dtype"] == dtype]).items()
    }
    figure = Figure(figsize=(11, 1.4 + 1.9 * len(panels)), layout="constrained")
    every_axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (title, rows) in zip(every_axes, panels.items(), strict=True):
        places = [row["number"] for row in rows]
        speedups = [row["speedup"] for row in rows]
        heights = [speedup - 1 for speedup in speedups]
        axes.bar(places, heights, bottom=1, color=PACKED, width=0.7, label="packed over request-wise, measured")
        axes.scatter(places, [row["limit"] for row in rows], marker="_", s=130, color=LIMIT, label="limit of sharing")
        for place, speedup in zip(places, speedups, strict=True):
            axes.annotate(
                f"{speedup:.3g}", (place, max(1, speedup)), (0, 2), textcoords="offset points", ha="center", fontsize=7
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.set_title(f"{title} heads", fontsize=10, loc="left")
        strip(axes)
    every_axes[0].legend(fontsize=8, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    every_axes[-1].set_xticks(sorted({row["number"] for row in result["rows"]}))
    every_axes[-1].set_xlabel("tree of PAT's Figure 9", fontsize=9)
    machine, ranks = result["machine"], result["arguments"]["tp"]
    figure.suptitle(
        f"CPU executor, one decode step of one layer: {machine['cpu']}, {plural(machine['threads'], 'thread')}, "
        f"{machine['isa']}{f', heads / {ranks} (one tensor-parallel rank)' if ranks > 1 else ''}",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    return figure


def draw_host(plan: dict[str, Any] | None, host: dict[str, Any] | None) -> Figure:
    """Time on the host: making a plan by tree, and the whole of our work in a step of the real scheduler process."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    parts = [part for part in (plan, host) if part is not None]
    every_axes = list(figure.subplots(1, len(parts), squeeze=False, width_ratios=(2.2, 1)[: len(parts)])[0])
    if plan is not None:
        draw_plan_times(every_axes.pop(0), plan)
    if host is not None:
        draw_step_costs(every_axes.pop(0), host)
    figure.suptitle("; ".join(sorted({part["machine"]["cpu"] for part in parts})), fontsize=9, x=0.01, ha="left")
    return figure


def draw_plan_times(axes: Axes, result: dict[str, Any]) -> None:
    for (heads, rows), colour in zip(by_heads(result["rows"]).items(), HEAD_COLOURS, strict=False):
        axes.plot([row["number"] for row in rows], [row["plan_us"] for row in rows], "o", color=colour, label=heads)
        axes.plot([row["number"] for row in rows], [row["amortised_us"] for row in rows], "_", color=colour)
    axes.axhline(PLAN_TARGET_US, color=TARGET, linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(sorted({row["number"] for row in result["rows"]}))
    axes.set_xlabel("tree of PAT's Figure 9", fontsize=9)
    axes.set_ylabel("us on one core", fontsize=9)
    axes.set_ylim(top=3 * axes.get_ylim()[1])
    axes.legend(fontsize=8, frameon=False, ncols=4, title="query / KV heads", title_fontsize=8, loc="upper left")
    steps = result["arguments"]["steps"]
    axes.set_title(
        f"Making a plan (dots; dashed: target), and over {steps} decode steps (bars)", fontsize=10, loc="left"
    )
    strip(axes)


def draw_step_costs(axes: Axes, result: dict[str, Any]) -> None:
    rows = result.get("server", [])
    for place, row in enumerate(rows):
        axes.bar(place - 0.2, row["median_window_us"], width=0.36, color=PACKED, label="median" if not place else None)
        axes.bar(place + 0.2, row["mean_us"], width=0.36, color=HEAD_COLOURS[3], label="mean" if not place else None)
        for offset, key in ((-0.2, "median_window_us"), (0.2, "mean_us")):
            axes.annotate(f"{row[key]:.0f}", (place + offset, row[key]), ha="center", va="bottom", fontsize=8)
        if row["target_us"]:
            axes.hlines(row["target_us"], place - 0.45, place + 0.45, color=TARGET, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(rows)), [f"{row['requests']:,} running" for row in rows])
    axes.set_ylabel("us a step", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_title("All host work in the server (dashed: target)", fontsize=10, loc="left")
    strip(axes)


def by_heads(rows: Rows) -> dict[str, Rows]:
    """Rows by "q/kv" heads, in the order in which these first appear."""
    groups: dict[str, Rows] = defaultdict(list)
    for row in rows:
        groups[f"{row['q_heads']}/{row['kv_heads']}"].append(row)
    return dict(groups)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


if __name__ == "__main__":
    main()
