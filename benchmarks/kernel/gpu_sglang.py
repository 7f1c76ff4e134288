"""FlashAttention 3 in two passes as a baseline: over shared prefixes, then over the rest."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernel.baseline import Baseline
from benchmarks.kernel.fixture import Fixture
from benchmarks.kernel.gpu_flashinfer import RANK_BANDWIDTH
from benchmarks.kernel.gpu_flatten import Cuts, candidates, levels_of
from benchmarks.kernel.stock import FA3_KV_DTYPES, Fa3Call


class Fa3TwoPass(Baseline):
    """FA3 over the shared prefix, one sequence of queries per group, FA3 over the rest, and merge_state_v2."""

    name = "fa3_two_pass"
    kv_dtypes = FA3_KV_DTYPES
    levels = "shared"

    def __init__(self, device: torch.device) -> None:
        import sgl_kernel.flash_attn

        self.module, self.combine = sgl_kernel.flash_attn, sgl_kernel.merge_state_v2

    def bind(self, fixture: Fixture) -> list[Any]:
        self.fixture = fixture
        self.prefix_out, self.rest_out = torch.empty_like(fixture.q), torch.empty_like(fixture.q)
        self.lse = torch.empty(fixture.q.shape[:2], device=fixture.device)
        return [
            (cuts, metadata)
            for cuts in candidates(fixture.case, RANK_BANDWIDTH, most_cuts=1, keep=2)
            for metadata in (True, False)
        ]

    def use(self, option: tuple[Cuts, bool]) -> None:
        cuts, self.with_metadata = self.option = option
        fixture = self.fixture
        self.passes = []
        for level in levels_of(fixture.case, cuts):
            ranges = [(request, *kv) for request, kv in zip(level.query_bounds[:-1], level.kv_ranges, strict=True)]
            bounds = torch.tensor(level.query_bounds, dtype=torch.int32, device=fixture.device)
            lens = torch.tensor([end - begin for _, begin, end in ranges], dtype=torch.int32, device=fixture.device)
            self.passes.append(Fa3Call(fixture, fixture.padded(ranges), bounds, lens, causal=False))

    def plan(self) -> None:
        if self.with_metadata:
            for call in self.passes:
                call.plan()

    def run(self) -> torch.Tensor:
        prefix, rest = self.passes
        prefix_lse = prefix.run(self.prefix_out).T.contiguous()
        rest_lse = rest.run(self.rest_out).T.contiguous()
        self.combine(self.prefix_out, prefix_lse, self.rest_out, rest_lse, self.fixture.out, self.lse)
        return self.fixture.out

    def facts(self) -> dict[str, Any]:
        return {"cuts": list(self.option[0]), "option": "metadata" if self.with_metadata else "no metadata"}
