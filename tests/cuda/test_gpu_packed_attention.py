"""`packed_attention` on a GPU gives what it gives on the CPU, whichever kernels run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import step_pool
from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from tests.cuda.cases import Case, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = torch.device("cuda", 0)


def inputs(case: Case, device: torch.device) -> dict[str, Any]:
    pool = case.pool
    tensors = {
        "q": case.q, "k_cache": pool.k_cache, "v_cache": pool.v_cache, "req_to_token": pool.req_to_token,
        "req_pool_indices": pool.req_pool_indices, "seq_lens": pool.seq_lens, **case.variant,
    }  # fmt: skip
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}


def run(case: Case, device: torch.device, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.full(case.q.shape[:2], torch.nan, device=device)
    out = packed_attention(**inputs(case, device), plan=case.plan, lse=lse, **options)
    assert out.device == device
    return out.cpu(), lse.cpu()


def check_same(case: Case, device: torch.device = GPU, **options: Any) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[case.q.dtype]
    out, lse = run(case, device, **options)
    expected, expected_lse = run(case, torch.device("cpu"))
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


@pytest.fixture(params=["native", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels that run the test; those that were chosen are seen to."""
    if request.param == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(step_pool, "unsupported_call", lambda *_: "this test wants the others")
    elif not _native.built_with_cuda:
        pytest.skip("the native module was built without CUDA")
    else:
        monkeypatch.setattr(step_pool, "untested_gpu", lambda device: None)  # this is the test
        monkeypatch.setattr(step_pool, "_triton_step", lambda reason: pytest.fail(reason))
    return request.param


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_same_as_on_the_cpu(kernels: str, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    workspace = PartialWorkspace()
    for seed in range(3):
        case = make_case(
            seed, heads=(16, 2), head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, requests=30, levels=4, tokens=300,
            max_new_tokens=[1, 40][seed % 2], num_sms=132,
        )  # fmt: skip
        if kv_dtype is not None:
            case.variant.update(k_scale=0.4, v_scale=1.5)
        check_same(case, workspace=workspace)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one(kernels: str) -> None:
    check_same(make_case(1, head_dim=128, requests=20), torch.device("cuda", 1))
    assert torch.cuda.current_device() == 0


def test_same_variants(kernels: str) -> None:
    case = make_case(1, head_dim=128, requests=20, logit_cap=5.0, window_left=30, with_sinks=True, max_new_tokens=10)
    check_same(case)
