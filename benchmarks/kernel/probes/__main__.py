"""Decides redesigns of the CUDA kernels by small programs, before the kernels themselves are touched.

    python -m benchmarks.kernel.probes --build-only
    python -m benchmarks.kernel.probes --out benchmarks/results/probes.json
    python -m benchmarks.kernel.probes --emulate

Each program beside this file has the copies, barriers and waits of one redesign, and only the products that its
question needs. It checks what it has read or computed. A figure, stated at its begin, decides:

    wide_tiles      mainloops of wide tiles that fill a whole SM
    tails_beside    a wide tile on half of each SM, tails beside it
    few_requests    a few requests in one launch, without queue and records
    tail_prefetch   tails prefetched into the L2 while wide tiles compute
    cluster_splits  KV splits of a head combined through distributed shared memory
    query_chains    a CTA keeps its rows along their whole path

Building needs nvcc, running a GPU of compute capability 9.0. --emulate runs the device code of the first three lane by
lane on the CPU. Exit status: 0, or 1 if a program failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.provenance import git_commit

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
CSRC = ROOT / "csrc"
INCLUDES = (f"-I{CSRC}", f"-I{FOLDER}", f"-I{FOLDER / 'device'}")
LIMIT_S = 60  # a program needs a few seconds; one that hangs must not take the others' time
PROBES = ("wide_tiles", "tails_beside", "few_requests", "tail_prefetch", "cluster_splits", "query_chains")
Rows = Sequence[dict[str, Any]]


def verdict(probe: str, rows: Rows) -> tuple[float, bool]:
    """The figure that decides, in the unit of its stop, and whether it is good enough to build the redesign."""
    if probe == "tail_prefetch":  # the least gain behind long CTA phases, each with its best size
        gains: dict[str, float] = {}
        for row in rows:
            case = str(row["case"]).rsplit(",", 1)[0]
            if not case.endswith("CTAs 10 us"):
                gains[case] = max(gains.get(case, 0.0), row["gained_us"])
        return min(gains.values()), min(gains.values()) >= 3
    if probe == "wide_tiles":  # the best mainloop
        most = max(row["tflops"] for row in rows if str(row["case"]).endswith(", cold"))
        return most, most >= 650
    if probe == "tails_beside":  # where wide tiles and tails take about the same time
        cases = [row for row in rows if "gain" in row]
        gain = min(cases, key=lambda row: abs(math.log(row["half_us"] / row["tails_us"])))["gain"]
        return gain, gain >= 1.15
    if probe == "few_requests":  # the better of two designs
        cases = [row for row in rows if "limit_us" in row]
        found = []
        for design in ("two_of_floor", "one_of_floor"):
            shares = [row[design] for row in cases]
            found.append((statistics.geometric_mean(shares), min(shares)))
        mean, least = max(found)
        return mean, mean >= 1 and least >= 0.85
    if probe == "cluster_splits":
        (gained,) = (row["gained_us"] for row in rows if row["case"] == "1 x 2048 tokens, best of each")
        return gained, gained >= 2
    if probe == "query_chains":  # the larger share of what each tree may take
        shares = []
        for tree, most in (("tree 2,", 21), ("tree 12,", 62)):
            times = [min(row["us"], row["prefetched_us"]) for row in rows if str(row["case"]).startswith(tree)]
            shares.append(min(times) / most)
        return max(shares), max(shares) <= 1
    raise ValueError(f"no such probe: {probe}")


def build(probe: str, binaries: Path) -> Path:
    """Compiles a program unless it is newer than its sources.

    Raises:
        RuntimeError: registers are spilled or MMAs serialized, so that a measurement would be of something else.
    """
    binary, sources = binaries / probe, [FOLDER / f"{probe}.cu", *FOLDER.rglob("*.*h"), *CSRC.rglob("*.*h")]
    if not binary.exists() or binary.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        binaries.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", *INCLUDES]
        command = ["nvcc", *flags, "-Xptxas", "-v", "-o", str(binary), str(sources[0])]
        compiled = subprocess.run(command, check=False, capture_output=True, text=True)
        if compiled.returncode != 0 or re.search(r"[1-9]\d* bytes spill|instructions are serialized", compiled.stderr):
            binary.unlink(missing_ok=True)
            raise RuntimeError(f"{probe}: {compiled.stdout}{compiled.stderr}")
    return binary


def emulate(binaries: Path) -> int:
    """Runs device code on the CPU, on top of the emulation that the tests of the kernels use. Returns the failures."""
    binaries.mkdir(parents=True, exist_ok=True)
    program = binaries / "emulated"
    flags = ["-O2", "-U_FORTIFY_SOURCE", "-std=c++17", "-Wall", "-Wno-unknown-pragmas"]
    includes = [f"-I{path}" for path in (FOLDER / "emulated", ROOT / "tests/cuda/emulation", CSRC, FOLDER)]
    capability = "-DPREFIXPACK_EMULATED_CAPABILITY=90"
    source = str(FOLDER / "emulated/check.cpp")
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *flags, capability, *includes, source, "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel.probes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PROBES, default=PROBES, help="these programs")
    parser.add_argument("--binaries", type=Path, default=ROOT / "build/probes", help="folder (build/probes)")
    parser.add_argument("--build-only", action="store_true", help="compile, and run nothing")
    parser.add_argument("--emulate", action="store_true", help="run device code on the CPU instead")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a program may take (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.emulate:
        return int(emulate(args.binaries) != 0)
    found: dict[str, Any] = {}
    failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        binaries = dict(zip(args.only, pool.map(lambda probe: build(probe, args.binaries), args.only), strict=True))
    if args.build_only:
        return 0
    for probe, binary in binaries.items():
        result = args.binaries / f"{probe}.json"
        try:
            status = subprocess.run([str(binary), str(result)], check=False, timeout=args.limit).returncode
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            print(f"{probe}: {'hangs' if status is None else f'exit status {status}'}\n", flush=True)
            failed = True
            continue
        found[probe] = json.loads(result.read_text())
        figure, worth = verdict(probe, found[probe]["rows"])
        found[probe]["verdict"] = {"figure": round(figure, 3), "worth_building": worth}
        print(f"{probe}: {figure:.2f}, {'worth building' if worth else 'stop'}\n", flush=True)
        if args.out:  # after each, so that nothing is lost if a later one takes too long
            args.out.write_text(json.dumps({"commit": git_commit(), "probes": found}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
