"""Reads that machine code waits for too soon."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.kernel.waits import ROOT, disassembler, listing, waits_of


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
