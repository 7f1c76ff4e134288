"""The Triton kernels compile for GPUs that are not here, and fit them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.native_build import disassembler
from sgl_prefix_attn.core.planner import ModelShape

triton_step = pytest.importorskip("sgl_prefix_attn.core.triton_step")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from sgl_prefix_attn.core import triton_kernels  # noqa: E402

pytestmark = pytest.mark.skipif(triton_step.INTERPRETED, reason="interpreted kernels are not compiled")

# Target, stages, shared memory of a block in bytes.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 3, 163 << 10),
    "sm_86": (GPUTarget("cuda", 86, 32), 2, 99 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 3, 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 3, 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 2, 64 << 10),
}
QUICK = ("sm_90", "gfx942")
LEAST_WARPS_PER_MULTIPROCESSOR = 8
INTS = ("words", "records", "query_position", "kv_slots", "tile_counter", "req_to_token")
FLOATS = ("lse", "sinks", "partial_o", "partial_lse")
LONGS = ("req_pool_indices", "seq_lens")


def compiled(kernel: Any, target: GPUTarget, constants: dict[str, Any], kv: str = "bf16", **options: Any) -> Any:
    """`kernel` for tensors of bf16, K and V of `kv`.

    Addresses and strides are multiples of 16, as PyTorch's and SGLang's are.
    """
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "v_scale", "logit_cap"):
            signature[name] = "fp32"
        elif name.endswith("stride") or name in ("kv_heads", "q_heads", "group", "window_left"):
            signature[name] = "i32"
        else:
            element = "i32" if name in INTS else "i64" if name in LONGS else "fp32" if name in FLOATS else "bf16"
            element = kv if name in ("k", "v") else element
            signature[name] = f"*{element}"
        if signature[name].startswith("*") or name.endswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(kernel, signature, indexed, attributes)
    return triton.compile(source, target=target, options=options)


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TARGETS])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return TARGETS[request.param]


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128,
                                      pytest.param(256, marks=pytest.mark.slow)])  # fmt: skip
@pytest.mark.parametrize("kv", ["bf16", "u8"], ids=["bf16", "fp8"])
def test_packed_attention_fits(target: Any, kv: str, head_dim: int, tmp_path: Path) -> None:
    gpu, stages, shared_bytes = target
    shape, amd = ModelShape(32, 8, head_dim), gpu.backend == "hip"
    fp8 = kv == "u8"
    constants = {"sinks": None, **triton_step.attend_constants(shape, torch.bfloat16, False, False, fp8=fp8, amd=amd)}
    num_warps = constants.pop("num_warps")
    kernel = compiled(triton_kernels.attend_packed, gpu, constants, kv, num_warps=num_warps, num_stages=stages)
    assert kernel.metadata.shared <= shared_bytes
    if gpu.backend == "cuda":
        # Rows of KV are copied 16 bytes at a time and in the background.
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
        registers, stack = resources(kernel, tmp_path)
        assert registers * 32 * LEAST_WARPS_PER_MULTIPROCESSOR <= 65536
        # Wide heads over fp8 do not quite fit on Hopper, with fewer keys at a time neither. 10.0 was never tuned for.
        most = 240 if gpu.arch == 100 else 144 if fp8 and head_dim == 256 else 64
        assert stack <= most, f"{stack} bytes spilled per thread"
    else:
        assert re.findall(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"]) == ["0"]


def resources(kernel: Any, tmp_path: Path) -> tuple[int, int]:
    """Registers and bytes of stack per thread."""
    tool = disassembler()
    if tool is None:
        pytest.skip("compiled; cuobjdump, which counts registers, is not installed")
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    done = subprocess.run(
        [tool, "-res-usage", str(tmp_path / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    used = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert used is not None, done.stdout
    return int(used[1]), int(used[2])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [80, 256])
def test_variants_fit(target: Any, head_dim: int) -> None:
    """Products in fp32, cap, window, sinks and lse at once, an odd head size, and the kernels before and after."""
    gpu, stages, shared_bytes = target
    shape = ModelShape(10, 2, head_dim)
    constants = triton_step.attend_constants(shape, torch.float32, True, True, amd=gpu.backend == "hip")
    num_warps = constants.pop("num_warps")
    kernel = compiled(triton_kernels.attend_packed, gpu, constants, num_warps=num_warps, num_stages=stages)
    assert kernel.metadata.shared <= shared_bytes
    compiled(triton_kernels.combine_partials, gpu, triton_step.combine_constants(shape))
    compiled(triton_kernels.prepare_step, gpu, {"BLOCK": triton_step.PREPARE_BLOCK})
