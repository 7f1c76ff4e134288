"""The GPU kernels compile for the architectures of wheels; none spills registers or has products that wait in vain."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.native_build import disassembler

ROOT = Path(__file__).parents[2]
JUMP = re.compile(r"(BRA|EXIT|RET|BRX)\b")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_no_kernel_spills(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks/kernel/static_report.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert not any(row["serialized_products"] for row in rows)
    kernels = [row for row in rows if row["function"].startswith("attention")]
    elements = ("bf16", "fp16", "bf16 over fp8", "fp16 over fp8")
    assert {(row["arch"], row["function"]) for row in kernels} == {
        (arch, f"{kernel} {head_dim} {element}")
        for arch in ("80", "86", "89", "90a", "120")
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
    nvcc, cuobjdump, cubin = shutil.which("nvcc"), disassembler(), tmp_path / "out.cubin"
    if nvcc is None or cuobjdump is None:
        pytest.skip("nvcc or cuobjdump is missing")
    file = ROOT / "csrc" / "cuda" / "instantiations" / f"{source}.cu"
    flags = ["-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", "-arch=sm_90a", "-cubin"]
    subprocess.run([nvcc, *flags, str(file), "-o", str(cubin)], check=True)
    sass = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    users = users_of_additions(sass)
    assert len(users) >= 6, "tile indices, semaphores and the last CTA's, of both kernels"
    assert not [user for user in users if "SHFL" in user]
