"""Places where SGLang takes an unknown backend name for a GPU's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.cpu_fallbacks import CpuFallbacks


def says_yes(backend: str) -> bool:
    return True


def test_on_a_cpu_there_is_no_triton_for_prefixpack(monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks = CpuFallbacks()
    monkeypatch.setattr(versions, "server_args", lambda: SimpleNamespace(device="cpu"))
    assert fallbacks.around_support_triton(says_yes, "prefixpack") is False
    assert fallbacks.around_support_triton(says_yes, "triton") is True
    monkeypatch.setattr(versions, "server_args", lambda: SimpleNamespace(device="cuda"))
    assert fallbacks.around_support_triton(says_yes, "prefixpack") is True


def test_last_slots_are_those_of_sglangs_own_torch_version() -> None:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    fallbacks, table = CpuFallbacks(), torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, prefixes = torch.tensor([3, 0, 1]), torch.tensor([10, 0, 1])

    def unused(*args: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the Triton path was taken")

    sglangs_own = fallbacks.around_get_last_loc(lambda *args: torch.tensor([5]), table, rows, prefixes)
    assert sglangs_own.tolist() == [5], "no backend runs on a CPU"
    fallbacks.has_cpu_backend = True
    ours = fallbacks.around_get_last_loc(unused, table, rows, prefixes)
    theirs = get_last_loc_torch(table, rows, prefixes)
    assert ours.tolist() == theirs.tolist() == [39, -1, 10]
    assert ours.dtype == theirs.dtype
