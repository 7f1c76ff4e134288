"""Which kernels run packed steps on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_prefix_attn.sglang_plugin.execution import kernel_set


def choose(setting: Any) -> Any:
    return kernel_set.choose_kernels(setting, TestKernels.GPU)


class TestKernels:
    GPU = torch.device("cuda")

    @pytest.fixture
    def h200(self, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
        monkeypatch.setattr(kernel_set._native, "built_with_cuda", True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return monkeypatch

    def test_native_where_they_run(self, h200: pytest.MonkeyPatch) -> None:
        assert choose("auto").name == choose("native").name == "native"
        assert choose("triton").name == "triton"

    @pytest.mark.parametrize(
        ("capability", "message"),
        [((7, 5), "the GPU has 7.5"), ((8, 6), "8.6 has 99 KiB"), ((8, 9), "8.9 has 99 KiB"), ((12, 0), "12.0 has")],
    )
    def test_triton_for_other_gpus(self, h200: pytest.MonkeyPatch, capability: tuple[int, int], message: str) -> None:
        h200.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert choose("auto").name == "triton"
        assert message in kernel_set.choose_kernels("native", self.GPU)

    def test_none_without_triton_either(self, h200: pytest.MonkeyPatch) -> None:
        h200.setattr(kernel_set._native, "built_with_cuda", False)
        h200.setattr(kernel_set, "triton_kernels", lambda: (_ for _ in ()).throw(ImportError("no triton")))
        assert "no triton" in kernel_set.choose_kernels("auto", self.GPU)

    def test_none_for_other_devices(self) -> None:
        assert kernel_set.choose_kernels("auto", torch.device("xpu")) == (
            "there are no packed kernels for the device xpu"
        )
