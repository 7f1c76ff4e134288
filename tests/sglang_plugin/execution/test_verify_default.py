"""Which servers' verify and mixed steps a GPU executor packs, by default and by setting."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.execution import drafts
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.gpu_fixture import host_kernels
from tests.support.server_facts import server_facts


def layer_of(head_dim: int, **options: Any) -> RadixAttention:
    return RadixAttention(4, head_dim, 1.0, 2, 0, **options)


# Two query heads on a KV head, head_dim 128 and bf16.
@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ({}, True),
        ({"drafts": 63}, True),  # 126 query rows on a KV head
        ({"drafts": 64}, False),  # with 128 the rule packs no step
        ({"trees": True}, False),
        ({"algorithm": "NGRAM"}, False),
        ({"algorithm": "DSPARK"}, False),
        ({"stock_backend": "triton"}, False),
        ({"head_dim": 64}, False),
        ({"kv_dtype": torch.float8_e4m3fn}, False),
        ({"kv_dtype": None}, False),
        ({"kernels": "triton"}, False),
        ({"committed": False}, False),  # each step would wait for the device
        ({"model": torch.nn.ModuleList()}, False),
        ({"model": torch.nn.ModuleList([layer_of(128), layer_of(64)])}, False),  # one of them was not measured
        ({"model": torch.nn.ModuleList([layer_of(128), layer_of(64, is_cross_attention=True)])}, True),  # runs stock
        ({"gpu": "NVIDIA H20"}, False),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, True),
    ],
)
def test_drafts_that_run_packed_by_default(
    options: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "drafts": 4, "trees": False, "algorithm": "EAGLE", "stock_backend": "fa3", "head_dim": 128,
        "kv_dtype": torch.bfloat16, "kernels": "native", "committed": True, "gpu": "NVIDIA H200", **options,
    }  # fmt: skip
    monkeypatch.setattr(versions, "keeps_committed_lens", lambda: given["committed"])
    monkeypatch.setattr(drafts, "current_gpu", lambda: SimpleNamespace(name=given["gpu"]))
    layers = [layer_of(given["head_dim"]) for _ in range(2)]
    facts = server_facts(
        spec_algorithm=getattr(SpeculativeAlgorithm, given["algorithm"]), kv_cache_dtype=given["kv_dtype"],
        model=given.get("model", torch.nn.ModuleList(layers)), speculative_num_draft_tokens=given["drafts"],
        speculative_eagle_topk=4 if given["trees"] else 1, attention_backend=given["stock_backend"],
    )  # fmt: skip
    kernels = dataclasses.replace(host_kernels(), name=given["kernels"])
    default = CudaExecutor(facts, Settings(metrics=False), kernels, given["stock_backend"])
    assert default.why_stock("verify") == (None if packs else fallback_reasons.SPECULATIVE)
    off = CudaExecutor(facts, Settings(metrics=False, pack_verify=False), kernels, given["stock_backend"])
    assert off.why_stock("verify") == fallback_reasons.DISABLED
    without_decode = CudaExecutor(facts, Settings(metrics=False, pack_decode=False), kernels, given["stock_backend"])
    assert without_decode.why_stock("verify") is not None


def test_a_server_without_drafts_packs_no_verify_step_by_default() -> None:
    facts = server_facts(spec_algorithm=SpeculativeAlgorithm.NONE)
    executor = CudaExecutor(facts, Settings(metrics=False), host_kernels(), "fa3")
    assert executor.why_stock("verify") == fallback_reasons.SPECULATIVE
    assert executor.why_stock("decode") is None


@pytest.mark.parametrize("wanted", ["auto", True])
@pytest.mark.parametrize("speculates", [False, True])
def test_mixed_steps_with_drafts_run_stock(wanted: Any, speculates: bool) -> None:
    """The tracker reads no paths of them, so buffers for them would be for nothing."""
    algorithm = SpeculativeAlgorithm.EAGLE if speculates else SpeculativeAlgorithm.NONE
    facts = server_facts(
        spec_algorithm=algorithm, model=torch.nn.ModuleList([layer_of(128)]), chunked_prefill_size=64,
        enable_mixed_chunk=True, speculative_num_draft_tokens=4, speculative_eagle_topk=1, attention_backend="fa3",
    )  # fmt: skip
    executor = CudaExecutor(facts, Settings(metrics=False, pack_mixed=wanted), host_kernels(), "fa3")
    assert executor.why_stock("mixed") == (fallback_reasons.SPECULATIVE if speculates else None)
    assert executor.judges_mixed == (wanted == "auto" and not speculates)
    assert (executor._prefill_tokens > 0) == (not speculates)
    on_cpu = CpuExecutor(facts, Settings(metrics=False, pack_mixed=wanted))
    assert on_cpu.why_stock("mixed") == (fallback_reasons.SPECULATIVE if speculates else None)
