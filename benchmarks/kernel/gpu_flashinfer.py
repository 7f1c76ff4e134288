"""FlashInfer's kernels as baselines (signatures of 0.6.14): decode, cascade by levels, BatchAttention.

Plans get their index pointers on the host, where a server knows them, so that none pays a blocking copy back; indices
are on the device. Wrappers are kept over the cases. Outputs go to buffers made once per case.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernel.baseline import Baseline
from benchmarks.kernel.fixture import Fixture
from benchmarks.kernel.gpu_flatten import Cuts, Level, candidates, levels_of
from benchmarks.kernel.stock import BF16, host_ints, paged, workspace

MOST_CUTS = 4
TENSOR_CORE_GROUP = 4  # SGLang's rule for decoding with tensor cores
RANK_BANDWIDTH = 4.3e12  # for ranking flattenings only


class BatchAttention(Baseline):
    """The holistic persistent kernel."""

    name = "flashinfer_batch_attention"

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self.wrapper = flashinfer.BatchAttention("NHD", str(device))

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        requests = len(fixture.case.seq_lens)
        self.qo_indptr, self.indptr = torch.arange(requests + 1, dtype=torch.int32), fixture.kv_indptr.cpu()
        self.lens = host_ints(fixture.case.seq_lens)
        self.lse = torch.empty(requests, fixture.heads[0], device=fixture.device)
        return [None]

    def plan(self) -> None:
        q_heads, kv_heads = self.fixture.heads
        self.wrapper.plan(
            self.qo_indptr, self.indptr, self.fixture.kv_indices, self.lens, q_heads, kv_heads, self.fixture.head_dim,
            self.fixture.head_dim, 1,
            causal=False, q_data_type=BF16, kv_data_type=self.fixture.kv_dtype,
        )  # fmt: skip

    def run(self) -> torch.Tensor:
        return self.wrapper.run(self.fixture.q, paged(self.fixture), out=self.fixture.out, lse=self.lse)[0]


class Cascade(Baseline):
    """Cascade attention: paged prefill with the fa2 template for every shared level, decode for the rest, combines.

    What MultiLevelCascadeAttentionWrapper does, but for its choice of the fa3 template, which is slow here, its fresh
    zeroed outputs, and prefill kernels for the last level. The best flattening of the forest is found by timing the
    likeliest of each number of levels. Not for cases without sharing.
    """

    name = "flashinfer_cascade"
    levels = "shared"

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self.combine = flashinfer.merge_state_in_place
        self.prefills = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="fa2")
            for _ in range(MOST_CUTS)
        ]
        self.rests = {
            tensor_cores: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace(device), "NHD", use_tensor_cores=tensor_cores
            )
            for tensor_cores in (False, True)
        }

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        self.rest = self.rests[fixture.heads[0] // fixture.heads[1] >= TENSOR_CORE_GROUP]
        lse_shape = (len(fixture.case.seq_lens), fixture.heads[0])
        self.lse, self.other_lse = (torch.empty(lse_shape, device=fixture.device) for _ in range(2))
        self.other_out = torch.empty_like(fixture.q)
        return list(candidates(fixture.case, RANK_BANDWIDTH, MOST_CUTS, kv_bytes=fixture.kv_dtype.itemsize))

    def use(self, option: Cuts) -> None:
        self.cuts = option
        *shared, last = (self._tensors(level) for level in levels_of(self.fixture.case, option))
        self.shared, self.last = shared, last

    def _tensors(self, level: Level) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(qo_indptr, kv_indptr, last page lengths) on the host and the indices on the device."""
        lens = torch.tensor([end - begin for begin, end in level.kv_ranges])
        kv_indptr = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)])
        requests = level.query_bounds[:-1]
        ranges = [(request, *kv_range) for request, kv_range in zip(requests, level.kv_ranges, strict=True)]
        indices = self.fixture.slots_of(ranges)
        return host_ints(level.query_bounds), kv_indptr.int(), lens.clamp(max=1).int(), indices

    def plan(self) -> None:
        shape = (*self.fixture.heads, self.fixture.head_dim, 1)
        types = {"q_data_type": BF16, "kv_data_type": self.fixture.kv_dtype}
        for wrapper, (qo_indptr, kv_indptr, last, indices) in zip(self.prefills, self.shared, strict=False):
            wrapper.plan(qo_indptr, kv_indptr, indices, last, *shape, causal=False, **types)
        _, kv_indptr, last, indices = self.last
        self.rest.plan(kv_indptr, indices, last, *shape, **types)

    def run(self) -> torch.Tensor:
        fixture, cache = self.fixture, paged(self.fixture)
        self.rest.run(fixture.q, cache, out=fixture.out, lse=self.lse, return_lse=True)
        for wrapper in self.prefills[: len(self.shared)]:
            wrapper.run(fixture.q, cache, out=self.other_out, lse=self.other_lse, return_lse=True)
            self.combine(fixture.out, self.lse, self.other_out, self.other_lse)
        return fixture.out

    def facts(self) -> dict[str, Any]:
        return {"cuts": list(self.cuts)}
