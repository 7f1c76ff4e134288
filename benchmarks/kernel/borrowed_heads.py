"""What it costs to route by a profile of other heads, over committed GPU results.

    python -m benchmarks.kernel.borrowed_heads --out benchmarks/results/borrowed_heads.json

For each head setting a profile is fitted to the development rows of these heads alone (16-bit KV, margins as calibrate
fits them). Each profile then routes the acceptance rows of each head setting: time lost against an oracle (geometric
mean over steps) and the largest loss against the stock backend.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_prefix_attn.calibration.fit_profile import fit_profile
from sgl_prefix_attn.calibration.judge import Candidate, Verdict, judge, outcomes, profile_choice
from sgl_prefix_attn.calibration.report import table_lines
from sgl_prefix_attn.calibration.sources import Source, gather
from sgl_prefix_attn.routing.measured import MeasuredCase, Results, read_results, stock_kernel
from sgl_prefix_attn.routing.profile import Profile, shipped_profile

RESULTS = Path(__file__).resolve().parents[1] / "results"
SOURCES = (
    "gpu_attention.json:fa3,flashinfer_tc,flashinfer_cc",
    *(f"gpu_drawn_dev{seed}.json" for seed in (61, 62, 63, 64, 65)),
)
ACCEPTANCE = ("gpu_drawn.json", "gpu_drawn_857294969.json")
HEAD_DIM = 128
STOCKS = ("fa3", "flashinfer")
ALL = "all heads (shipped)"


def heads_of(case: MeasuredCase) -> str:
    return f"{case.shape.q_heads}/{case.shape.kv_heads}"


def profiles_by_heads(fitted: Results) -> dict[str, Profile]:
    """A profile of each head setting that has rows enough for all terms."""
    found: dict[str, Profile] = {}
    for heads in sorted({heads_of(case) for case in fitted.cases}, key=lambda text: [*map(int, text.split("/"))]):
        own = replace(fitted, cases=[case for case in fitted.cases if heads_of(case) == heads])
        try:
            found[heads] = fit_profile(own)
        except ValueError:  # too few rows
            continue
    return found


def verdict_of(profile: Profile, cases: list[MeasuredCase], backend: str) -> Verdict | None:
    """How a profile routes the steps; None: it has no cost of their stock kernel, or there are no steps."""
    usable = [case for case in cases if case.stock_us(backend) is not None and "native" in case.packed]
    if not usable or any(profile.cost("stock", stock_kernel(backend, case.shape)) is None for case in usable):
        return None
    chosen = Candidate("", profile_choice(profile, "native", backend, None))
    return judge(outcomes(usable, chosen, "native", backend))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", default=ACCEPTANCE, metavar="FILE", help="rows to route")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    fitted = gather([Source.parse(str(RESULTS / text)) for text in SOURCES], kv_bytes=2)
    fitted = replace(fitted, cases=[case for case in fitted.cases if case.shape.head_dim == HEAD_DIM])
    check = [
        case
        for file in args.check
        for case in read_results(RESULTS / file).cases
        if case.shape.kv_bytes == 2 and case.shape.head_dim == HEAD_DIM
    ]
    made = profiles_by_heads(fitted)
    by_stock: dict[str, list[dict[str, Any]]] = {}
    for stock in STOCKS:
        rows = by_stock[stock] = []
        for target in made:
            cases = [case for case in check if heads_of(case) == target]
            for source, profile in {**made, ALL: shipped_profile()}.items():
                found = verdict_of(profile, cases, stock)
                if found is not None:
                    loss = {"worst_loss": round(found.worst_loss[0], 4), "worst_key": found.worst_loss[1]}
                    rows.append(
                        {"steps_of": target, "profile_of": source, "steps": found.steps}
                        | {"mean_regret": round(found.mean_regret, 5), "behind": found.behind, **loss}
                    )
        print(f"{stock}\n" + "\n".join(table_lines(summary(rows))))
    if args.out is not None:
        content = {"check": list(args.check), "fitted": list(SOURCES), "rows": by_stock}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """By heads of the steps: the profile of these heads, the others' median and worst, and that of all heads."""
    table = [("steps of", "steps", "own profile", "others, median", "others, worst", "behind, own / worst", ALL)]
    for target in dict.fromkeys(row["steps_of"] for row in rows):
        of = {row["profile_of"]: row for row in rows if row["steps_of"] == target}
        others = sorted((of[name] for name in of if name not in (target, ALL)), key=lambda row: row["mean_regret"])
        if not others or target not in of:
            continue
        own, worst, median = of[target], others[-1], others[len(others) // 2]
        behind = f"{own['behind']} / {max(row['behind'] for row in others)}"
        cells = (f"{row['mean_regret']:.1%}" for row in (own, median))
        all_heads = f"{of[ALL]['mean_regret']:.1%}" if ALL in of else "?"
        table.append(
            (
                target,
                str(own["steps"]),
                *cells,
                f"{worst['mean_regret']:.1%} ({worst['profile_of']})",
                behind,
                all_heads,
            )
        )
    return table


if __name__ == "__main__":
    main()
