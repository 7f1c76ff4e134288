"""Decode attention on a GPU over drawn batches: ours against FlashInfer and FA3, about 300 cases of all families.

    python -m benchmarks.kernel.gpu_drawn --set dev --seed 1 --out build/gpu_drawn.json
    python -m benchmarks.kernel.gpu_drawn --set dev --seed 1 --out build/gpu_drawn.json --resume
    python -m benchmarks.kernel.gpu_drawn --set acceptance --out benchmarks/results/gpu_drawn.json
    python -m benchmarks.kernel.gpu_drawn --families rollouts long_documents --cases 60

Work is tuned on seeds of `dev`. `acceptance` draws its seed from the system and records it; every such file is kept.
Cases are those of `benchmarks.workloads.draw_set`. Every prefix of a set samples families and heads evenly, so a
run that is stopped is a smaller sample. Rows are those of gpu_attention, with fewer repetitions. FlashInfer compiles
kernels of other types and head sizes than bf16 and 128 at first use, which takes minutes: --jit allows it.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel.baseline import Baseline
from benchmarks.kernel.fixture import KV_DTYPES, KvPool, pool_elements
from benchmarks.kernel.gpu_attention import machine_facts, make_baselines, override
from benchmarks.kernel.gpu_case_run import CaseRun
from benchmarks.kernel.gpu_drawn_report import drawn_lines, drawn_summary, row_line
from benchmarks.kernel.gpu_limits import limits
from benchmarks.kernel.gpu_report import OURS, Results
from benchmarks.kernel.timing import Effort, Timer
from benchmarks.provenance import git_commit
from benchmarks.workloads import ALL_FAMILIES, Case, draw_set
from benchmarks.workloads.draw import USUAL_SET

SETS = ("dev", "acceptance")
BASELINES = (
    OURS, "fa3", "fa3_two_pass", "flashinfer_decode_cc", "flashinfer_decode_tc", "flashinfer_batch_attention",
    "flashinfer_cascade",
)  # fmt: skip
EFFORT = Effort(cold_replays=12, warm_replays=4, launches=4)
MOST_SECONDS = 560.0  # a command of a lent machine has ten minutes


def serves(baseline: Baseline, case: Case, jit: bool) -> bool:
    """Whether a baseline has kernels for the case's KV type and head size, compiled ahead unless `jit`."""
    if KV_DTYPES[case.kv_dtype] not in baseline.kv_dtypes:
        return False
    usual = case.kv_dtype == "bf16" and case.head_dim == 128
    return usual or jit or not baseline.name.startswith("flashinfer")


def seed_of(args: argparse.Namespace) -> int:
    """Seed of the run: the file's when it is resumed, the system's for a new acceptance run.

    Raises:
        ValueError: arguments that contradict each other or the file.
    """
    if args.set == "acceptance" and args.seed is not None:
        raise ValueError("--set acceptance draws its own seed; --seed is for --set dev")
    if args.out is not None and args.out.exists():
        before: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8"))
        if args.resume:
            if before.get("set") != args.set or args.seed not in (None, before["seed"]):
                raise ValueError(f"{args.out} holds set {before.get('set')} with seed {before.get('seed')}")
            return int(before["seed"])
        if args.set == "acceptance" or before.get("set") == "acceptance":
            raise ValueError(f"{args.out} exists; acceptance runs are kept: choose another --out or --resume")
    if args.set == "acceptance":
        return secrets.randbits(31)
    return 1 if args.seed is None else int(args.seed)


def run_cases(cases: list[Case], baselines: list[Baseline], results: Results, timer: Timer, args: Any) -> int:
    """Adds a row for each case; 3 if the device was lost on the way, else 0."""
    begin = time.monotonic()
    pools: dict[str, KvPool] = {}
    gc.freeze()
    for done, case in enumerate(cases):
        passed = time.monotonic() - begin
        if passed > args.seconds:
            print(f"stopping after {passed:.0f} s; {len(cases) - done} cases left (--resume)", file=sys.stderr)
            break
        if case.kv_dtype not in pools:
            elements = pool_elements(other for other in cases if other.kv_dtype == case.kv_dtype)
            pools[case.kv_dtype] = KvPool(elements, timer.device, KV_DTYPES[case.kv_dtype])
        chosen = [baseline for baseline in baselines if serves(baseline, case, args.jit)]
        bandwidth = results.header["machine"]["copy_bandwidth"]
        run = CaseRun(case, chosen, pools[case.kv_dtype], timer, bandwidth)
        row = {**run.row(), "set": results.header["set"], "seed": results.header["seed"]}
        results.add(row)
        print(f"[{done + 1}/{len(cases)} {passed:.0f}s] {row_line(row)}", file=sys.stderr, flush=True)
        if run.device_lost:
            print(f"{case.key} left the device unusable; go on with --resume", file=sys.stderr)
            return 3
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel.gpu_drawn", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    result.add_argument("--set", choices=SETS, default="dev", help="default dev")
    result.add_argument("--seed", type=int, help="of the development set (default 1)")
    result.add_argument("--families", nargs="+", choices=ALL_FAMILIES, default=list(ALL_FAMILIES), metavar="FAMILY",
                        help=f"default: all of {', '.join(ALL_FAMILIES)}")  # fmt: skip
    result.add_argument("--cases", type=int, default=USUAL_SET, help=f"size of the set (default {USUAL_SET})")
    result.add_argument("--heads", nargs="+", metavar="Q/KV", help="only cases with these heads, e.g. 32/8 8/1")
    result.add_argument("--baselines", "--ways", nargs="+", choices=BASELINES, default=list(BASELINES), metavar="NAME",
                        help=f"default: all of {', '.join(BASELINES)}")  # fmt: skip
    result.add_argument("--jit", action="store_true", help="let FlashInfer compile kernels of other shapes")
    result.add_argument("--seconds", type=float, default=MOST_SECONDS, help="start no case after this time")
    result.add_argument("--device-model", nargs="+", type=override, default=[], metavar="FIELD=VALUE",
                        help="replace fields of DeviceModel.gpu, e.g. reread=0.1")  # fmt: skip
    result.add_argument("--out", type=Path, help="JSON file of results")
    result.add_argument("--resume", action="store_true", help="skip the cases that --out already has")
    result.add_argument("--commit", default=git_commit(), help="commit to record (default: git's)")
    result.add_argument("--list", action="store_true", help="print the cases and their limits at 4.3 TB/s")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.resume and args.out is None:
        parser().error("--resume needs --out")
    try:
        seed = seed_of(args)
    except ValueError as error:
        parser().error(str(error))
    cases = [
        case
        for case in draw_set(seed, args.cases, args.families)
        if args.heads is None or f"{case.heads[0]}/{case.heads[1]}" in args.heads
    ]
    if args.list:
        for case in cases:
            limit_us = limits(case, 4.3e12, kv_bytes=case.shape.kv_bytes).limit_us
            print(f"{case.key:<36} {len(case.seq_lens):>5} requests {limit_us:>9.1f} us  {case.detail[:120]}")
        return 0
    if not torch.cuda.is_available():
        print("gpu_drawn: no CUDA device; this benchmark measures on one (try --list)", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    timer = Timer(device, effort=EFFORT)
    baselines, absent = make_baselines(args.baselines, dict(args.device_model), device, None)
    if not args.jit:
        absent["flashinfer, other types and head sizes than bf16 and 128"] = "compiled at first use: --jit"
    header = {
        "machine": machine_facts(device, timer), "commit": args.commit,
        "set": args.set, "seed": seed, "families": args.families, "cases": args.cases, "absent": absent,
        "device_model": dict(args.device_model),
    }  # fmt: skip
    results = Results(args.out, header, resume=args.resume, summarise=drawn_summary)
    results.write()
    with torch.inference_mode():
        status = run_cases([case for case in cases if not results.done(case.key)], baselines, results, timer, args)
    print(f"set {args.set}, seed {seed}")
    print("\n".join(drawn_lines(results.rows)))
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main())
