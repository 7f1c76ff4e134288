"""What the compiler says of the GPU kernels: registers, spills, size of the code. Needs nvcc, no GPU.

    python benchmarks/kernel/static_report.py --archs 86 90a

Exits with 1 if a kernel spills registers, or if products of a warpgroup have to wait for each other (ptxas calls it
serialized; results stay right, at a fraction of the speed).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda" / "instantiations").glob("*.cu"))
ARCHS = ["80", "86", "89", "90a", "120"]  # of wheels
FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function ')\s*'?(\w+)")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SECTION = re.compile(r"\.text\.(\w+)\s+PROGBITS\s+\w+\s+\w+\s+([0-9a-f]+)")  # of a kernel and what it calls


def readable(symbol: str) -> str:
    """ "attention_ctas 128 bf16" or "tile 64 of 128 bf16" for a mangled name."""
    element = "bf16" if "BFloat16" in symbol else "fp16"
    if "Fp8Kv" in symbol:
        element += " over fp8"
    if "WithTrees" in symbol:
        element += ", trees"
    tile = re.search(r"TileILi(\d+)ELi(\d+)E", symbol)
    if tile:
        return f"tile {tile.group(2):>3} of {tile.group(1)} {element}"
    kernel = re.search(r"(attention_ctas|attention_warps|run_epilogue)ILi(\d+)E", symbol)
    return f"{kernel.group(1)} {kernel.group(2)} {element}" if kernel else symbol


def compile_report(nvcc: str, source: Path, arch: str) -> list[dict[str, object]]:
    """Compiles one source for one architecture; returns a row per function.

    Raises:
        RuntimeError: nvcc failed; the message holds its output.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "out.cubin"
        command = [
            nvcc,
            "-O3",
            "-std=c++17",
            f"-I{ROOT / 'csrc'}",
            f"-arch=sm_{arch}",
            "-cubin",
            "-Xptxas",
            "-v",
            str(source),
            "-o",
            str(cubin),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        size = cubin.stat().st_size
        sections = subprocess.run(["readelf", "-SW", str(cubin)], capture_output=True, text=True, check=True).stdout
    code_bytes = {readable(symbol): int(code, 16) for symbol, code in SECTION.findall(sections)}
    rows: list[dict[str, object]] = []
    for line in done.stderr.splitlines():
        if match := FUNCTION.search(line):
            name = readable(match.group(1))
            if not rows or rows[-1]["function"] != name:
                rows.append(
                    {
                        "source": source.name,
                        "arch": arch,
                        "function": name,
                        "registers": None,
                        "code_bytes": code_bytes.get(name),
                    }
                )
        elif match := SPILL.search(line):
            rows[-1].update(spill_store_bytes=int(match.group(2)), spill_load_bytes=int(match.group(3)))
        elif match := REGISTERS.search(line):
            entry = next(
                row
                for row in reversed(rows)
                if str(row["function"]).startswith("attention") and row["registers"] is None
            )
            entry["registers"] = int(match.group(1))
    serialized = sum("wgmma" in line and "serialized" in line for line in done.stderr.splitlines())
    seconds = round(time.perf_counter() - start, 1)
    for row in rows:
        row.update(serialized_products=serialized, cubin_bytes=size, compile_seconds=seconds)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", default=ARCHS, help=f"default: {' '.join(ARCHS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (default: cores)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None or shutil.which("readelf") is None:
        print(f"static_report: {'nvcc' if nvcc is None else 'readelf (binutils)'} is not on PATH", file=sys.stderr)
        return 2
    tasks = [(source, arch) for source in SOURCES for arch in args.archs]
    with ThreadPoolExecutor(args.jobs) as pool:
        reports = pool.map(lambda task: compile_report(nvcc, *task), tasks)
        rows = [row for report in tqdm(reports, total=len(tasks), unit="source", file=sys.stderr) for row in report]
    print(f"{'arch':>5}  {'function':<28} {'registers':>9} {'spilled bytes':>13} {'code bytes':>10}")
    for row in rows:
        spilled = f"{row['spill_store_bytes']}/{row['spill_load_bytes']}"
        numbers = f"{row['registers'] or '':>9} {spilled:>13} {row['code_bytes'] or '':>10}"
        print(f"{row['arch']:>5}  {row['function']:<28} {numbers}")
    spilling = [row for row in rows if row["spill_store_bytes"] or row["spill_load_bytes"]]
    waiting = sorted({f"{row['source']} for {row['arch']}" for row in rows if row["serialized_products"]})
    if waiting:
        print(f"products of a warpgroup wait for each other in {', '.join(waiting)}")
    sizes = {(row["source"], row["arch"]): row["cubin_bytes"] for row in rows}
    print(f"{len(rows)} functions, {len(spilling)} spill; {sum(sizes.values()) / 1e6:.1f} MB of device code")
    if args.out:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        release = version.split("release ")[-1].split(",")[0]
        args.out.write_text(json.dumps({"nvcc": release, "rows": rows}, indent=1) + "\n")
    return 1 if spilling or waiting else 0


if __name__ == "__main__":
    sys.exit(main())
