"""Decode attention on a GPU, one layer's step: prefixpack against what is installed of FlashInfer, FA3 and SGLang.

    python -m benchmarks.kernel.gpu_attention --out build/gpu_attention.json
    python -m benchmarks.kernel.gpu_attention --quick
    python -m benchmarks.kernel.gpu_attention --cases 'pat/0*' 'none/*' --heads 32/8 64/8
    python -m benchmarks.kernel.gpu_attention --kv-dtype fp8_e4m3 --out build/gpu_attention_fp8.json

bf16, KV also in fp8, head size 128, KV pool of page size 1, slots of a batch in random order. Every result is compared
with ours and, for some requests, with dense float32 attention; a wrong or failing baseline is recorded and not timed.
Three times each: CUDA graph with a cold L2, CUDA graph with a warm L2, and planning plus launch on the host's clock.
Copy bandwidth is measured first; limits (see gpu_limits.py) rest on it. The file is rewritten after every case: a
killed run keeps what it has, and --resume goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import gc
import platform
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel.baseline import Baseline
from benchmarks.kernel.fixture import KV_DTYPES, KvPool, pool_elements
from benchmarks.kernel.gpu_case_run import CaseRun, described
from benchmarks.kernel.gpu_cases import select
from benchmarks.kernel.gpu_drawn_report import row_line
from benchmarks.kernel.gpu_limits import MATRIX_RATE, limits
from benchmarks.kernel.gpu_report import OURS, OURS_TOO, Results, summary_lines
from benchmarks.kernel.timing import Timer, copy_bandwidth
from benchmarks.provenance import git_commit, package_versions
from benchmarks.workloads.case import HEAD_DIM, Case, Heads

PACKAGES = ("torch", "triton", "flashinfer-python", "sglang-kernel", "sglang", "numpy")
Makers = dict[str, Callable[[torch.device], Baseline]]


def makers(overrides: dict[str, Any]) -> Makers:
    """Every baseline by name; making one raises what its import raises."""
    from benchmarks.kernel import gpu_flashinfer, gpu_sglang, packed, stock

    return {
        OURS: lambda device: packed.PrefixPack(device, overrides),
        "flashinfer_decode_cc": lambda device: stock.Decode(device, tensor_cores=False),
        "flashinfer_decode_tc": lambda device: stock.Decode(device, tensor_cores=True),
        "flashinfer_batch_attention": gpu_flashinfer.BatchAttention,
        "flashinfer_cascade": gpu_flashinfer.Cascade,
        "fa3": stock.Fa3,
        "fa3_two_pass": gpu_sglang.Fa3TwoPass,
        "triton": stock.TritonDecode,
        OURS_TOO: lambda device: packed.PrefixPackTriton(device, overrides),
    }


def make_baselines(
    names: list[str], overrides: dict[str, Any], device: torch.device, kv_dtype: torch.dtype | None = torch.bfloat16
) -> tuple[list[Baseline], dict[str, str]]:
    """The baselines that are installed and take such KV (None: any), and why the others are left out."""
    baselines, absent = [], {}
    for name, make in makers(overrides).items():
        if name not in names:
            continue
        try:
            baseline = make(device)
            if kv_dtype is not None and kv_dtype not in baseline.kv_dtypes:
                raise ValueError(f"takes no KV in {kv_dtype} with queries in bf16")
            baselines.append(baseline)
        except Exception as error:  # an import of another project's package may raise anything
            absent[name] = described(error)
            print(f"{name}: not available: {absent[name]}", file=sys.stderr)
    return baselines, absent


def machine_facts(device: torch.device, timer: Timer) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name, "num_sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1), "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda, "python": platform.python_version(), "versions": package_versions(PACKAGES),
        "copy_bandwidth": copy_bandwidth(device), "matrix_rate": MATRIX_RATE,
        "graph_floor_us": round(timer.graph_floor_us(), 2),
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
    }  # fmt: skip


def run_cases(
    cases: list[Case], baselines: list[Baseline], results: Results, timer: Timer, args: argparse.Namespace
) -> int:
    """Adds a row for each case; 3 if the device was lost on the way, else 0."""
    bandwidth = results.header["machine"]["copy_bandwidth"]
    begin = time.monotonic()
    if not cases:
        return 0
    pool = KvPool(pool_elements(cases), timer.device, KV_DTYPES[args.kv_dtype])
    gc.freeze()
    for done, case in enumerate(cases):
        if time.monotonic() - begin > args.seconds:
            print(f"stopping after {args.seconds:.0f} s; {len(cases) - done} cases left (--resume)", file=sys.stderr)
            break
        print(f"[{done + 1}/{len(cases)} {time.monotonic() - begin:.0f}s] {case.key}", file=sys.stderr, flush=True)
        run = CaseRun(case, baselines, pool, timer, bandwidth)
        results.add(run.row())
        if run.device_lost:
            print(f"{case.key} left the device unusable; go on with --resume", file=sys.stderr)
            return 3
    return 0


def head_setting(text: str) -> Heads:
    q_heads, slash, kv_heads = text.partition("/")
    if not slash or not q_heads.isdigit() or not kv_heads.isdigit() or int(q_heads) % max(1, int(kv_heads)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected query heads / KV heads, e.g. 32/8")
    return int(q_heads), int(kv_heads)


def override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected field=value, e.g. reread=0.1")
    return name, ast.literal_eval(value)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel.gpu_attention", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    result.add_argument("--cases", nargs="+", default=[], metavar="GLOB", help="names, e.g. 'pat/*' (default: all)")
    result.add_argument(
        "--heads",
        nargs="+",
        type=head_setting,
        metavar="Q/KV",
        help="head settings for every case (default: those its family is published with)",
    )
    result.add_argument(
        "--baselines",
        "--ways",
        nargs="+",
        default=list(makers({})),
        metavar="NAME",
        choices=list(makers({})),
        help=f"default: all of {', '.join(makers({}))}",
    )
    result.add_argument("--quick", action="store_true", help="a dozen cases of every kind at 32/8")
    result.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16", help="type of the KV pool (default bf16)")
    result.add_argument("--max-kv-gib", type=float, default=40.0, help="leave out cases with more KV (default 40)")
    result.add_argument(
        "--device-model",
        nargs="+",
        type=override,
        default=[],
        metavar="FIELD=VALUE",
        help="replace fields of DeviceModel.gpu, e.g. reread=0.1 tile_rows='(16,64,128)'",
    )
    result.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    result.add_argument("--out", type=Path, help="JSON file of results")
    result.add_argument("--resume", action="store_true", help="skip the cases that --out already has")
    result.add_argument("--commit", default=git_commit(), help="commit to record (default: git's)")
    result.add_argument("--list", action="store_true", help="print the chosen cases and their limits at 4.3 TB/s")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.resume and args.out is None:
        parser().error("--resume needs --out")
    cases = select(args.cases, args.heads, args.quick)
    kv_dtype = KV_DTYPES[args.kv_dtype]
    too_large = [case for case in cases if case.kv_bytes(kv_dtype.itemsize) > args.max_kv_gib * 2**30]
    cases = [case for case in cases if case not in too_large]
    if not cases:
        parser().error(f"no case matches {args.cases} within {args.max_kv_gib} GiB of KV; see --list")
    if args.list:
        for case in cases:
            print(
                f"{case.key:<36} {len(case.seq_lens):>5} requests {case.kv_bytes(kv_dtype.itemsize) / 2**30:>7.2f} GiB "
                f"{limits(case, 4.3e12, kv_bytes=kv_dtype.itemsize).limit_us:>8.1f} us"
            )
        return 0
    if not torch.cuda.is_available():
        print("gpu_attention: no CUDA device; this benchmark measures on one (try --list)", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    timer = Timer(device)
    baselines, absent = make_baselines(args.baselines, dict(args.device_model), device, kv_dtype)
    header = {
        "machine": machine_facts(device, timer), "commit": args.commit, "head_dim": HEAD_DIM,
        "kv_dtype": args.kv_dtype, "absent": absent,
        "left_out": [case.key for case in too_large], "device_model": dict(args.device_model),
    }  # fmt: skip
    machine = header["machine"]
    print(
        f"{machine['gpu']}: copies move {machine['copy_bandwidth'] / 1e12:.3f} TB/s; "
        f"a graph of one empty kernel takes {machine['graph_floor_us']} us in these cold times",
        flush=True,
    )
    try:
        results = Results(args.out, header, resume=args.resume)
    except ValueError as error:
        parser().error(str(error))
    with torch.inference_mode():
        status = run_cases([case for case in cases if not results.done(case.key)], baselines, results, timer, args)
    print("\n".join([*map(row_line, results.rows), *summary_lines(results.rows)]))
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main())
