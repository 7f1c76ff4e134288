"""The stock backends' decode kernels: FlashInfer (signatures of 0.6.14), sgl-kernel's FlashAttention 3 (0.4.5), Triton.

FlashInfer's plans get their index pointers on the host, where a server knows them, so that none pays a blocking copy
back; indices are on the device. Wrappers are kept over the cases. Outputs go to buffers made once per case.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernel.baseline import Baseline
from benchmarks.kernel.fixture import Fixture

WORKSPACE_BYTES = 4 << 30
BF16 = torch.bfloat16
FA3_KV_DTYPES = (torch.bfloat16,)  # fp8 KV needs fp8 queries, which is another computation
TRITON_MAX_SPLITS = 8  # --triton-attention-num-kv-splits


_workspaces: dict[torch.device, torch.Tensor] = {}


def workspace(device: torch.device) -> torch.Tensor:
    """One buffer for all wrappers: they run one after the other on one stream."""
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device]


def host_ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def paged(fixture: Fixture) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as pages of one slot: [slots, 1, kv_heads, head_dim]."""
    return fixture.k[:, None], fixture.v[:, None]


class Decode(Baseline):
    """BatchDecodeWithPagedKVCacheWrapper, with CUDA cores or with tensor cores."""

    def __init__(self, device: torch.device, tensor_cores: bool) -> None:
        import flashinfer

        self.name = f"flashinfer_decode_{'tc' if tensor_cores else 'cc'}"
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(device), "NHD", use_tensor_cores=tensor_cores
        )

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        self.indptr, self.last = fixture.kv_indptr.cpu(), host_ints([1] * len(fixture.case.seq_lens))
        return [None]

    def plan(self) -> None:
        q_heads, kv_heads = self.fixture.heads
        self.wrapper.plan(
            self.indptr, self.fixture.kv_indices, self.last, q_heads, kv_heads, self.fixture.head_dim, 1,
            q_data_type=BF16, kv_data_type=self.fixture.kv_dtype,
        )  # fmt: skip

    def run(self) -> torch.Tensor:
        return self.wrapper.run(self.fixture.q, paged(self.fixture), out=self.fixture.out)


class Fa3Call:
    """flash_attn_with_kvcache for groups of consecutive queries that see all of their group's table.

    Args:
        table: int32 [groups, longest] slots.
        bounds: [groups + 1] int32 query offsets; one query per group is plain decode.
        lens: [groups] int32 KV lengths.
        causal: as SGLang's decode passes it; the same result at one query per group.
    """

    def __init__(
        self, fixture: Fixture, table: torch.Tensor, bounds: torch.Tensor, lens: torch.Tensor, *, causal: bool
    ) -> None:
        self.fixture, self.table, self.bounds, self.lens, self.causal = fixture, table, bounds, lens, causal
        self.longest_query = int((bounds[1:] - bounds[:-1]).max())
        self.metadata: torch.Tensor | None = None

    def plan(self) -> None:
        from sgl_kernel.flash_attn import get_scheduler_metadata

        q_heads, kv_heads = self.fixture.heads
        self.metadata = get_scheduler_metadata(
            batch_size=len(self.lens), max_seqlen_q=self.longest_query,
            max_seqlen_k=self.table.shape[1], num_heads=q_heads, num_heads_k=kv_heads,
            headdim=self.fixture.head_dim, cache_seqlens=self.lens, qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.bounds, page_size=1, causal=self.causal, num_splits=0,
        )  # fmt: skip

    def run(self, out: torch.Tensor) -> torch.Tensor:
        """Writes `out`; returns the natural-log lse, float32 [q_heads, queries]."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        k, v = paged(self.fixture)
        _, lse, *_ = flash_attn_with_kvcache(
            q=self.fixture.q, k_cache=k, v_cache=v, page_table=self.table, cache_seqlens=self.lens,
            cu_seqlens_q=self.bounds, max_seqlen_q=self.longest_query, softmax_scale=self.fixture.scale,
            causal=self.causal, scheduler_metadata=self.metadata, num_splits=0, return_softmax_lse=True, out=out,
        )  # fmt: skip
        return lse


def single_queries(fixture: Fixture) -> torch.Tensor:
    return torch.arange(len(fixture.case.seq_lens) + 1, dtype=torch.int32, device=fixture.device)


class Fa3(Baseline):
    """What SGLang decodes with on Hopper by default; scheduler metadata once per step, if that is the faster."""

    name = "fa3"
    kv_dtypes = FA3_KV_DTYPES

    def __init__(self, device: torch.device) -> None:
        import sgl_kernel.flash_attn

        supported = getattr(sgl_kernel.flash_attn, "is_fa3_supported", None)
        if supported is not None and not supported():
            raise ValueError("sgl-kernel has no FlashAttention 3 for this GPU")
        self.module = sgl_kernel.flash_attn

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        self.call = Fa3Call(fixture, fixture.table, single_queries(fixture), fixture.lens, causal=True)
        return ["metadata", "no metadata"]

    def use(self, option: str) -> None:
        self.option = option
        self.call.metadata = None

    def plan(self) -> None:
        if self.option == "metadata":
            self.call.plan()

    def run(self) -> torch.Tensor:
        self.call.run(self.fixture.out)
        return self.fixture.out

    def facts(self) -> dict[str, Any]:
        return {"option": self.option}


class TritonDecode(Baseline):
    """SGLang's `triton` backend: split-KV decode; the number of splits is made on the device once per step."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        import triton
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        self.next_power = triton.next_power_of_2
        self.forward, self.count_splits = decode_attention_fwd, get_num_kv_splits_triton
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        shape = (len(fixture.case.seq_lens), fixture.heads[0], TRITON_MAX_SPLITS)
        self.partials = torch.empty(*shape, fixture.head_dim, device=fixture.device)
        self.partial_lse = torch.empty(shape, device=fixture.device)
        self.splits = torch.empty(shape[0], dtype=torch.int32, device=fixture.device)
        self.kv_indices = fixture.kv_indices.long()  # as servers: the kernel's offsets overflow in 32 bits
        return [None]

    def plan(self) -> None:
        requests, (q_heads, kv_heads) = len(self.splits), self.fixture.heads
        self.count_splits[(1,)](
            self.splits, self.fixture.lens64, requests, 1, q_heads, kv_heads, TRITON_MAX_SPLITS, self.num_sms,
            MAX_NUM_SEQ=max(256, self.next_power(requests)),
        )  # fmt: skip

    def run(self) -> torch.Tensor:
        fixture = self.fixture
        self.forward(
            fixture.q, fixture.k, fixture.v, fixture.out, fixture.kv_indptr, self.kv_indices, self.partials,
            self.partial_lse, self.splits, TRITON_MAX_SPLITS, fixture.scale, 1.0, 1.0,
        )  # fmt: skip
        return fixture.out
