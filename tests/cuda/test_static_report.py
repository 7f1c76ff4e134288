"""The GPU kernels compile for the architectures of wheels; none spills registers or has products that wait in vain."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.native_build import disassembler

ROOT = Path(__file__).parents[2]
INSTANTIATIONS = ROOT / "csrc" / "cuda" / "instantiations"
ARCHS = ("80", "86", "89", "90a", "120")  # of wheels
JUMP = re.compile(r"(BRA|EXIT|RET|BRX)\b")
FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function ')\s*'?(\w+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SECTION = re.compile(r"\.text\.(\w+)\s+PROGBITS\s+\w+\s+\w+\s+([0-9a-f]+)")  # of a kernel and what it calls


def readable(symbol: str) -> str:
    """ "attention_ctas 128 bf16" for a mangled name; other functions as they are."""
    kernel = re.search(r"(attention_ctas|attention_warps)ILi(\d+)E", symbol)
    element = "bf16" if "BFloat16" in symbol else "fp16"
    more = f"{' over fp8' if 'Fp8Kv' in symbol else ''}{', trees' if 'WithTrees' in symbol else ''}"
    return f"{kernel[1]} {kernel[2]} {element}{more}" if kernel else symbol


def compile_to(cubin: Path, source: Path, arch: str) -> str:
    """Compiles one source; returns what ptxas says of its functions."""
    flags = ["-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v"]
    done = subprocess.run(["nvcc", *flags, str(source), "-o", str(cubin)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def report(folder: Path, source: Path, arch: str) -> list[dict[str, Any]]:
    """A row for each function of a source. Products of a warpgroup that wait for each other are `serialized`."""
    cubin = folder / f"{source.stem}.{arch}"
    said = compile_to(cubin, source, arch)
    sections = subprocess.run(["readelf", "-SW", str(cubin)], capture_output=True, text=True, check=True).stdout
    sizes = {symbol: int(size, 16) for symbol, size in SECTION.findall(sections)}
    origin = {"source": source.name, "arch": arch, "serialized": "serialized" in said}
    rows: dict[str, dict[str, Any]] = {}
    kernel = symbol = ""
    for line in said.splitlines():
        if match := FUNCTION.search(line):
            symbol = match[1]
            kernel = symbol if "Compiling" in line else kernel
            named = {"function": readable(symbol), "code_bytes": sizes.get(symbol)}
            rows.setdefault(symbol, {**origin, **named, "registers": None, "spilled": None})
        elif match := SPILLS.search(line):
            rows[symbol]["spilled"] = int(match[1]) + int(match[2])
        elif match := REGISTERS.search(line):
            rows[kernel]["registers"] = int(match[1])
    return list(rows.values())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_no_kernel_spills(tmp_path: Path) -> None:
    tasks = list(itertools.product(sorted(INSTANTIATIONS.glob("*.cu")), ARCHS))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(itertools.chain(*pool.map(lambda task: report(tmp_path, *task), tasks)))
    assert [row for row in rows if row["spilled"] != 0 or row["serialized"]] == []
    kernels = [row for row in rows if row["function"].startswith("attention")]
    elements = ("bf16", "fp16", "bf16 over fp8", "fp16 over fp8")
    assert {(row["arch"], row["function"]) for row in kernels} == {
        (arch, f"{kernel} {head_dim} {element}")
        for arch in ARCHS
        for types in elements
        for element in (types, f"{types}, trees")
        for kernel, head_dims in (("attention_ctas", (64, 128, 256)), ("attention_warps", (64, 128)))
        for head_dim in head_dims
    }
    assert all(0 < row["registers"] <= 255 for row in kernels)
    # What an H200 fetches of a kernel's code ahead of it; the rest would come while all wait for it.
    ends = tuple(f" {head_dim} {element}" for head_dim in (64, 128) for element in elements)
    at_once = [row for row in kernels if row["arch"] == "90a" and row["function"].endswith(ends)]
    assert len(at_once) == 16
    assert all(0 < row["code_bytes"] <= 64 << 10 for row in at_once)


def users_of_additions(sass: str) -> list[str]:
    """For each atomic addition in a listing of machine code, the next of eight instructions that names its result."""
    users = []
    for function in sass.split("Function :")[1:]:
        code = re.findall(r"^\s+/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\d+\s+)?(.*?)\s*;", function, re.MULTILINE)
        for place, instruction in enumerate(code):
            if addition := re.match(r"ATOMG?\.\S+\s+(?:PT,\s*)?R(\d+),", instruction):
                behind = itertools.takewhile(lambda later: not JUMP.match(later), code[place + 1 : place + 9])
                users.append(next((later for later in behind if re.search(rf"\bR{addition[1]}\b", later)), ""))
    return users


@pytest.mark.slow
@pytest.mark.parametrize("source", ["hdim128_bf16", "hdim64_fp16", "hdim128_bf16_fp8_kv"])
def test_no_addition_is_made_for_a_whole_warp(source: str, tmp_path: Path) -> None:
    """As the compiler would make one of what it takes for an addition by every lane: all would wait for its sum."""
    cuobjdump, cubin = disassembler(), tmp_path / "out.cubin"
    if shutil.which("nvcc") is None or cuobjdump is None:
        pytest.skip("nvcc or cuobjdump is missing")
    compile_to(cubin, INSTANTIATIONS / f"{source}.cu", "90a")
    sass = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    users = users_of_additions(sass)
    assert len(users) >= 6, "tile indices, semaphores and the last CTA's, of both kernels"
    assert not [user for user in users if "SHFL" in user]
