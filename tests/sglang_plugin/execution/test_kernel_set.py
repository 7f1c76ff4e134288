"""Which kernels run packed steps on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_prefix_attn.core import limits
from sgl_prefix_attn.core.planner import DeviceModel
from sgl_prefix_attn.sglang_plugin.execution import kernel_set


def choose(setting: Any) -> Any:
    return kernel_set.choose_kernels(setting, TestKernels.GPU)


def gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int], code: int, shared_kib: int) -> None:
    """A GPU, and a native module whose code for it was compiled for the capability `code`; 0: it has none."""
    patch.setattr(kernel_set._native, "built_with_cuda", True)
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
        gpu(h200, (8, 0), code=80, shared_kib=163)
        assert choose("auto").name == "native"

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
    def test_triton_where_there_is_no_code(
        self, h200: pytest.MonkeyPatch, capability: tuple[int, int], code: int, shared_kib: int, message: str
    ) -> None:
        gpu(h200, capability, code, shared_kib)
        assert choose("auto").name == "triton"
        assert message in choose("native")

    @pytest.mark.parametrize(("capability", "code"), [((8, 6), 86), ((8, 9), 86), ((8, 9), 89), ((12, 0), 120)])
    def test_native_where_they_never_ran_if_asked(
        self, h200: pytest.MonkeyPatch, capability: tuple[int, int], code: int
    ) -> None:
        gpu(h200, capability, code, 99)
        assert choose("auto").name == "triton"
        assert "has never run" in str(kernel_set.why_not_native(self.GPU))
        assert choose("native").name == "native"

    def test_the_planner_knows_the_ctas_of_an_sm(self, h200: pytest.MonkeyPatch) -> None:
        for capability, code, ctas, warps in (((9, 0), 90, 2, 8), ((8, 0), 80, 2, 8), ((8, 9), 89, 1, 7)):
            gpu(h200, capability, code, 99 if ctas == 1 else 163)
            figures = choose("native").ctas_of_sm(self.GPU)
            device = DeviceModel.gpu(142, **figures)
            assert (device.workers, device.narrow_per_worker) == (142 * ctas, warps)
            assert choose("triton").ctas_of_sm(self.GPU) == {}

    def test_none_without_triton_either(self, h200: pytest.MonkeyPatch) -> None:
        h200.setattr(kernel_set._native, "built_with_cuda", False)
        h200.setattr(kernel_set, "triton_kernels", lambda: (_ for _ in ()).throw(ImportError("no triton")))
        assert "no triton" in kernel_set.choose_kernels("auto", self.GPU)

    def test_none_for_other_devices(self) -> None:
        assert kernel_set.choose_kernels("auto", torch.device("xpu")) == (
            "there are no packed kernels for the device xpu"
        )
