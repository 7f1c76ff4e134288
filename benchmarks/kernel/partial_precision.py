"""What partial outputs of 16 bits would cost in precision: the plans of PAT's trees, partials rounded, then combined.

    python -m benchmarks.kernel.partial_precision --out benchmarks/results/partial_precision.json

For queries drawn from each tree, attention over each range that the query's plan gives it is computed in float64; the
partial outputs are rounded to the type in question, their log-sum-exp to float32, and combined in float32 in the plan's
order, as the kernels do. Errors are norms over the norm of the float64 result of the whole row: of the combined float32
row, and of what is stored of it, in bf16. Keys and values are unit noise; `sharp` multiplies queries, so that few
positions have most of the weight. No GPU needed.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.kernel.gpu_cases import select
from benchmarks.provenance import git_commit
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.workloads.case import HEAD_DIM, Case

PARTIALS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SHARPNESS = {"flat": 1.0, "sharp": 6.0}
PLACES = ("combined", "stored in bf16")
Range = tuple[int, int]


def ranges_of_queries(case: Case) -> list[list[Range]]:
    """The KV ranges, in order, that the plan of a case gives each of its queries, in packed order."""
    shape = ModelShape(*case.heads, HEAD_DIM)
    plan = Planner(shape, DeviceModel.gpu(132, group=shape.group)).plan(case.forest(), case.lengths)
    ranges: list[list[Range]] = [[] for _ in plan.query_request]
    for query_begin, query_count, _, kv_begin, kv_end, *_ in plan.items.tolist():
        for query in range(query_begin, query_begin + query_count):
            end = case.seq_lens[plan.query_request[query]] if kv_end < 0 else kv_end
            ranges[query].append((kv_begin, end))
    return [sorted(of) for of in ranges]


def errors(ranges: list[Range], sharpness: float, generator: torch.Generator) -> dict[str, tuple[float, float]]:
    """By type of the partials: relative error of the combined row in float32, and of the same in bf16."""
    tokens = ranges[-1][1]
    q, k, v = (
        torch.randn(rows, HEAD_DIM, generator=generator, dtype=torch.float64).bfloat16().double()
        for rows in (1, tokens, tokens)
    )
    scores = (q * sharpness * HEAD_DIM**-0.5 @ k.T)[0]
    exact = torch.softmax(scores, 0) @ v
    outputs = torch.stack([torch.softmax(scores[begin:end], 0) @ v[begin:end] for begin, end in ranges])
    lse = torch.stack([scores[begin:end].logsumexp(0) for begin, end in ranges]).float()
    found = {}
    for name, dtype in PARTIALS.items():
        weights = torch.exp(lse - lse.logsumexp(0))
        combined = torch.zeros(HEAD_DIM)
        for weight, partial in zip(weights, outputs.float().to(dtype).float(), strict=True):
            combined += weight * partial
        found[name] = (relative(combined, exact), relative(combined.bfloat16(), exact))
    return found


def relative(row: torch.Tensor, exact: torch.Tensor) -> float:
    return ((row.double() - exact).norm() / exact.norm()).item()


def measure(case: Case, queries: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    every = ranges_of_queries(case)
    drawn = [every[i] for i in torch.randperm(len(every), generator=generator)[:queries].tolist()]
    row: dict[str, Any] = {"key": case.key, "partials_of_a_row": max(map(len, every))}
    for label, sharpness in SHARPNESS.items():
        of_queries = [errors(ranges, sharpness, generator) for ranges in drawn]
        row[label] = {
            name: {
                place: float(f"{sum(found[name][i] for found in of_queries) / len(of_queries):.3g}")
                for i, place in enumerate(PLACES)
            }
            for name in PARTIALS
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["pat/*"], metavar="GLOB", help="default: pat/*")
    parser.add_argument("--queries", type=int, default=16, help="drawn from each case (default 16)")
    parser.add_argument("--out", type=Path, help="JSON file of results")
    parser.add_argument("--commit", default=git_commit(), help="commit to record (default: git's)")
    args = parser.parse_args()
    if args.queries < 1:
        parser.error(f"--queries {args.queries}: at least one")
    cases = [case for case in select(args.cases, [(32, 8)]) if any(len(of) > 1 for of in ranges_of_queries(case))]
    if not cases:
        parser.error(f"no case of {args.cases} has a plan with partial results")
    rows = [measure(case, args.queries, seed) for seed, case in enumerate(tqdm(cases, unit="tree"))]
    for label in SHARPNESS:
        print(f"{label}: largest mean relative error of a case: partials, combined in float32, stored in bf16")
        for name in PARTIALS:
            worst = [max(row[label][name][place] for row in rows) for place in PLACES]
            print(f"  {name:>9} {worst[0]:9.1e} {worst[1]:9.1e}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        header = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        content = {**header, "commit": args.commit, "queries": args.queries, "head_dim": HEAD_DIM, "rows": rows}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
