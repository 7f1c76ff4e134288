"""The GPU kernels compile for the architectures of wheels; none spills registers or has products that wait in vain."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.waits import disassembler, listing, waits_of

ROOT = Path(__file__).parents[2]


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


@pytest.mark.slow
@pytest.mark.parametrize("source", ["hdim128_bf16", "hdim64_fp16", "hdim128_bf16_fp8_kv"])
def test_no_addition_is_made_for_a_whole_warp(source: str) -> None:
    """As the compiler would make one of what it takes for an addition by every lane: all would wait for its sum."""
    nvcc, cuobjdump = shutil.which("nvcc"), disassembler()
    if nvcc is None or cuobjdump is None:
        pytest.skip("nvcc or cuobjdump is missing")
    waits = list(waits_of(listing(nvcc, cuobjdump, ROOT / "csrc" / "cuda" / "instantiations" / f"{source}.cu", "90a")))
    additions = [wait for wait in waits if "ATOM" in wait.read]
    assert len(additions) >= 6, "tile indices, semaphores and the last CTA's, of both kernels"
    assert not [wait for wait in additions if wait.distance is not None and wait.distance <= 8 and "SHFL" in wait.user]
