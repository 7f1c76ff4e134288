"""Which kernels run packed steps on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import limits
from sgl_prefix_attn.core.gpu import Gpu
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.sglang_plugin.execution import kernel_set
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import NO_CUDA_KERNEL, Refused
from tests.core.test_gpu_model import PROPERTIES


def choose(setting: Any) -> Any:
    return kernel_set.choose_kernels(setting, TestKernels.GPU)


def gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int], code: int, shared_kib: int) -> None:
    """A GPU, and a native module whose code for it was compiled for the capability `code`; 0: it has none."""
    patch.setattr(_native, "built_with_cuda", True)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(limits, "shared_bytes_per_cta", lambda device: shared_kib << 10)

    def code_capability(device: torch.device) -> int:
        if code == 0:
            raise RuntimeError("no kernel image")
        return code

    patch.setattr(limits, "code_capability", code_capability)
    patch.setattr(kernel_set, "code_capability", code_capability)


class TestKernels:
    GPU = torch.device("cuda")

    @pytest.fixture
    def h200(self, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
        gpu(monkeypatch, (9, 0), code=90, shared_kib=227)
        return monkeypatch

    def test_native_where_they_run(self, h200: pytest.MonkeyPatch) -> None:
        assert choose("auto").name == choose("native").name == "native"
        assert choose("triton").name == "triton"

    @pytest.mark.parametrize(
        ("capability", "code", "shared_kib", "message"),
        [
            ((7, 5), 0, 64, "the GPU has 7.5"),
            ((8, 6), 80, 99, "for compute capability 8.0 needs 113 KiB of shared memory per CTA, the GPU (8.6) has 99"),
            ((8, 9), 80, 99, "build with PREFIXPACK_CUDA_ARCHS=89"),
            ((12, 0), 80, 99, "the GPU (12.0) has 99 KiB"),
            ((10, 0), 0, 227, "no code for compute capability 10.0: no kernel image; build with"),
        ],
    )
    def test_triton_where_there_is_no_code(self, h200, capability, code, shared_kib, message):
        gpu(h200, capability, code, shared_kib)
        assert choose("auto").name == "triton"
        assert message in choose("native").detail

    @pytest.mark.parametrize(
        ("capability", "code"), [((8, 0), 80), ((9, 0), 80), ((10, 0), 80), ((8, 6), 86), ((8, 9), 89), ((12, 0), 120)]
    )
    def test_native_where_they_never_ran_if_asked(self, h200, capability, code):
        gpu(h200, capability, code, 163)
        assert choose("auto").name == "triton"
        assert "has never run" in str(limits.why_not_native(self.GPU))
        assert choose("native").name == "native"

    def test_the_planner_knows_the_ctas_of_an_sm(self, h200: pytest.MonkeyPatch) -> None:
        for name, code, ctas, warps in (("H200", 90, 2, 8), ("A100-SXM4-80GB", 80, 1, 8), ("L40S", 89, 1, 7)):
            gpu(h200, (code // 10, code % 10), code, 99 if ctas == 1 else 163)
            properties = PROPERTIES[f"NVIDIA {name}"]
            h200.setattr(kernel_set, "gpu_of", lambda device, found=properties: Gpu.of_properties(found))
            native = choose("native") if code == 90 else kernel_set.native_kernels()
            device = native.device_model(self.GPU, ModelShape(32, 8, 128), 128)
            assert (device.workers, device.narrow_per_worker) == (properties.multi_processor_count * ctas, warps)
            triton = choose("triton").device_model(self.GPU, ModelShape(32, 8, 128), 128)
            assert (triton.workers, triton.tile_rows[-1]) == (2 * properties.multi_processor_count, 64)

    def test_none_without_triton_either(self, h200: pytest.MonkeyPatch) -> None:
        h200.setattr(_native, "built_with_cuda", False)
        h200.setattr(kernel_set, "triton_kernels", lambda: (_ for _ in ()).throw(ImportError("no triton")))
        assert "no triton" in choose("auto").detail

    def test_none_for_other_devices(self) -> None:
        refused = kernel_set.choose_kernels("auto", torch.device("xpu"))
        assert refused == Refused(NO_CUDA_KERNEL, "there are no packed kernels for the device xpu")


def test_an_amd_gpu_gets_kernels_only_if_asked_for(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for setting in ("auto", "native"):
        assert "AMD" in choose(setting).detail
    assert choose("triton").name == "triton"
