"""Draws what is in benchmarks/results for README and docs.

    python benchmarks/plot_results.py [--results benchmarks/results] [--out docs/img]

gpu_attention.json becomes gpu_attention.png, gpu_drawn.json gains.png, and the servers of the README servers.png. What
was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.doc_tables import gains_of_servers
from benchmarks.kernel.gpu_plot import draw_gains, draw_pat

ROOT = Path(__file__).resolve().parents[1]
PACKED, EQUAL, LIMIT = "#2b8cbe", "#a8ddb5", "#404040"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    gpu, drawn = (read(args.results / f"{name}.json") for name in ("gpu_attention", "gpu_drawn"))
    if gpu is None and drawn is None:
        raise SystemExit(f"{args.results} has neither gpu_attention.json nor gpu_drawn.json")
    args.out.mkdir(parents=True, exist_ok=True)
    figure = draw_pat(gpu) if gpu is not None else None
    if figure is not None:
        save(figure, args.out / "gpu_attention.png")
    save(draw_servers(), args.out / "servers.png")
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
        axes.barh(-place, gain, color=PACKED if gain > 1.02 else EQUAL, height=0.6)
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


def strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


if __name__ == "__main__":
    main()
