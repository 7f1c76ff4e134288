"""Reads that machine code waits for too soon."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.kernel.waits import ROOT, disassembler, listing, waits_of

LISTING = """
\t\tFunction : first
        /*0000*/                   LDG.E R4, desc[UR4][R2.64] ;         /* 0x0000000402047981 */
                                                                        /* 0x000ea4000c1e1900 */
        /*0010*/              @!P0 LD.E R40, desc[UR4][R4.64] ;
        /*0020*/                   IMAD R41, R5, R6, RZ ;
        /*0030*/                   IADD3 R40, R41, 0x1, RZ ;
        /*0040*/                   STG.E desc[UR4][R8.64], R40 ;
        /*0050*/              @P0  ATOMG.E.ADD.STRONG.GPU PT, R7, desc[UR4][R8.64], R9 ;
        /*0060*/                   SHFL.IDX PT, R10, R7, RZ, 0x1f ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R8.64] ;
        /*0080*/                   LDG.E.64 R12, desc[UR4][R2.64] ;
        /*0090*/                   BRA 0x200 ;
        /*00a0*/                   MOV R14, R12 ;
        /*00b0*/                   LDG.E.128.STRONG.GPU R20, desc[UR4][R2.64] ;
        /*00c0*/                   FADD R30, R24, R25 ;
        /*00d0*/                   FADD R30, R30, R23 ;
        /*00e0*/                   LDG.E R16, desc[UR4][R2.64] ;
\t\tFunction : second
        /*0000*/                   MOV R14, R16 ;
"""


def test_the_first_instruction_that_needs_what_a_read_brings() -> None:
    found = [(wait.function, wait.address, wait.distance, wait.user.split()[0] if wait.user else "")
             for wait in waits_of(LISTING)]  # fmt: skip
    assert found == [
        ("first", 0x00, 1, "@!P0"),
        ("first", 0x10, 3, "STG.E"),  # written once more before: as far as that it is not followed
        ("first", 0x50, 1, "SHFL.IDX"),
        ("first", 0x80, None, ""),
        ("first", 0xB0, 2, "FADD"),  # the last of its four registers
        ("first", 0xE0, None, ""),
    ]


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
