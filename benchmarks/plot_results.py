"""Draws what is in benchmarks/results for README and docs.

    python benchmarks/plot_results.py [--results benchmarks/results] [--out docs/img]

gpu_attention.json becomes gpu_attention.png, and gpu_drawn.json gains.png. What was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.kernel.gpu_plot import draw_gains, draw_pat

ROOT = Path(__file__).resolve().parents[1]


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
    if drawn is not None:
        save(draw_gains(drawn), args.out / "gains.png")


def read(path: Path) -> dict[str, Any] | None:
    """Content of a result file, None if it was not measured."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
