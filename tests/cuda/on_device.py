"""Runs a case on kernels that take the tensors of a device: CUDA's, or Triton's on a GPU or in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.cuda.cases import Case, Result

# make_step(shape, dtype, device, limits, kv_dtype)
MakeStep = Callable[..., Any]


class OnDevice:
    """A case with its tensors on the device, and all that the kernels are to write poisoned before each run."""

    def __init__(self, case: Case, make_step: MakeStep, device: torch.device, limits: Any, growth: int) -> None:
        self.case, self.device, self.growth = case, device, growth
        pool = case.pool
        self.step = make_step(case.shape, case.q.dtype, device, limits, pool.k_cache.dtype)
        self.q = case.q.to(device)
        self.k_cache, self.v_cache = self._with_gaps(pool.k_cache), self._with_gaps(pool.v_cache)
        self.req_to_token = pool.req_to_token.to(device)
        self.rows = pool.req_pool_indices.to(device)
        self.seq_lens = pool.seq_lens.to(device)
        self.visible = None if case.visible is None else case.visible.to(device)
        self.out = torch.full_like(self.q, torch.nan)
        self.lse = torch.full(self.q.shape[:2], torch.nan, device=device)
        self.variant = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in case.variant.items()
        }

    def _with_gaps(self, cache: torch.Tensor) -> torch.Tensor:
        """A copy with gaps between heads and slots, as the pool was made."""
        slots, heads, head_dim = cache.shape
        storage = torch.full((slots, heads + 1, head_dim + 16), torch.nan, dtype=cache.dtype).to(self.device)
        storage[:, :heads, :head_dim] = cache.to(self.device)
        return storage[:, :heads, :head_dim]

    def prepare(self) -> None:
        self.step.load(self.case.plan, self.case.planned_lens, self.growth)
        self.prepare_at(self.seq_lens)

    def prepare_at(self, seq_lens: torch.Tensor) -> None:
        self.step.prepare(self.req_to_token, self.rows, seq_lens, self.visible)

    def attend(self) -> None:
        self.step.attend(self.q, self.k_cache, self.v_cache, self.out, lse=self.lse, **self.variant)

    def run(self) -> Result:
        for written in (self.out, self.lse, self.step._partial_o, self.step._partial_lse):
            written.fill_(torch.nan)
        self.step._kv_slots.fill_(len(self.k_cache) - 1)  # a slot of NaN, or of somebody else
        self.prepare()
        self.attend()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.out.clone(), self.lse.clone()

    def captured(self) -> torch.cuda.CUDAGraph:
        """A graph of `attend`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.attend()
        return graph
