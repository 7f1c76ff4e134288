"""Steps with several query rows a request, drawn: mixed steps, and verify steps of speculative decoding.

`draw_mixed` draws as the papers on POD and PackInfer do: chunks of 512 to 4,096 tokens beside 16 to 256 decodes of 1K
to 32K tokens, shared or not; and short suffixes over long cached prefixes. `draw_wide` draws chunks of up to 8,192
tokens over up to 64K cached ones, beside decodes of which a part shares a prefix, with more heads. Verify steps are
those of `benchmarks.workloads.draw_set` with n drafts a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.workloads import Case, Heads, draw_set
from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.gpu import H200, Gpu, planner_model
from sgl_prefix_attn.core.planner import DeviceModel, Plan, Planner

BANDWIDTH, FLOPS = 4.3e12, 750e12  # of an H200 as measured; runs measure the bandwidth of their GPU
HEADS = (32, 8)
WIDE_HEADS: tuple[Heads, ...] = ((32, 8), (64, 8), (32, 4), (28, 4), (32, 32), (8, 1))


@dataclass(frozen=True)
class RowsCase:
    """A step.

    Attributes:
        query_lens: [requests] new tokens.
        num_prefill: requests that prefill, which stand in front.
        gpu: that plans are for.
        bandwidth: its bytes per second, for the limit.
    """

    case: Case
    query_lens: Int64Array
    num_prefill: int
    gpu: Gpu = H200
    bandwidth: float = BANDWIDTH

    @property
    def limit_us(self) -> float:
        """No kernel is faster: each KV position, query and output once through memory, and all products."""
        q_heads, _ = self.case.heads
        row_bytes = 4 * int(self.query_lens.sum()) * q_heads * self.case.head_dim
        new, lens = self.query_lens, self.case.lengths
        seen = float((new * lens - new * (new - 1) / 2).sum())
        flops = 4.0 * q_heads * self.case.head_dim * seen
        return max((self.case.kv_bytes() + row_bytes) / self.bandwidth, flops / FLOPS) * 1e6

    def plan(self) -> tuple[Plan, DeviceModel]:
        """Its plan, and the device that it is for."""
        lens = self.case.lengths
        forest = PrefixForest.from_paths(self.case.paths, prefix_lens=(lens - self.query_lens).tolist())
        device = planner_model(self.gpu, self.case.shape, code=90)
        return Planner(self.case.shape, device).plan(forest, lens, self.query_lens), device


def draw_mixed(seed: int, count: int) -> list[RowsCase]:
    rng = np.random.default_rng(seed)
    cases = []
    for index in range(count):
        kind = ("chunk", "chunk_shared", "suffixes")[index % 3]
        decodes = int(2 ** rng.uniform(4, 8))
        chunk = int(2 ** rng.uniform(9, 12))
        context = (2 ** rng.uniform(10, 15, decodes)).astype(np.int64)
        shared = int(2 ** rng.uniform(10, 14))
        if kind == "suffixes":  # of requests over one long prefix, whose samples also decode
            prefills = int(rng.integers(2, 17))
            new = np.maximum(1, np.full(prefills, chunk // 8 // prefills))
        else:
            prefills = int(rng.integers(1, 4))
            new = np.maximum(1, (rng.dirichlet(np.ones(prefills)) * chunk).astype(np.int64))
        cached = (2 ** rng.uniform(0, 13, prefills)).astype(np.int64)
        paths: list[tuple[tuple[int, int, int], ...]] = [()] * (prefills + decodes)
        lens = np.concatenate([cached + new, context])
        if kind != "chunk":
            first = 0 if kind == "suffixes" else prefills
            for request in range(first, len(paths)):
                paths[request] = ((0, 0, shared),)
                own = int(rng.integers(1, 512))
                lens[request] = shared + (int(new[request]) if request < prefills else own)
        query_lens = np.concatenate([new, np.ones(decodes, dtype=np.int64)])
        detail = f"{prefills} prefills of {int(new.sum())} tokens, {decodes} decodes"
        case = Case(f"{kind}/{seed}-{index}", HEADS, tuple(paths), tuple(lens.tolist()), detail=detail)
        cases.append(RowsCase(case, query_lens, prefills))
    return cases


def draw_wide(seed: int, count: int) -> list[RowsCase]:
    rng = np.random.default_rng(seed)
    cases = []
    for index in range(count):
        prefills, decodes = int(rng.integers(1, 4)), int(2 ** rng.uniform(4, 8))
        chunk = 2 ** rng.uniform(9, 13)
        new = np.maximum(2, (rng.dirichlet(np.ones(prefills)) * chunk).astype(np.int64))
        cached = (2 ** rng.uniform(0, 16, prefills)).astype(np.int64)
        prefix = int(2 ** rng.uniform(9, 14))
        sharing = int(rng.binomial(decodes, rng.uniform(0.2, 1.0)))
        shared = prefix + rng.integers(1, 1024, sharing)
        alone = (2 ** rng.uniform(9, 14, decodes - sharing)).astype(np.int64)
        lens = np.concatenate([cached + new, shared, alone])
        paths = ((),) * prefills + (((0, 0, prefix),),) * sharing + ((),) * (decodes - sharing)
        query_lens = np.concatenate([new, np.ones(decodes, dtype=np.int64)])
        detail = f"{prefills} prefills of {int(new.sum())} tokens, {decodes} decodes, {sharing} on {prefix} tokens"
        heads = WIDE_HEADS[index % len(WIDE_HEADS)]
        case = Case(f"wide/{seed}-{index}", heads, paths, tuple(lens.tolist()), detail=detail)
        cases.append(RowsCase(case, query_lens, prefills))
    return cases


def draw_verify(seed: int, count: int, drafts: int) -> list[RowsCase]:
    cases = []
    for case in draw_set(seed, count):
        if case.kv_dtype == "bf16":
            lens = tuple(length - 1 + drafts for length in case.seq_lens)
            longer = Case(
                f"{case.name}-n{drafts}", case.heads, case.paths, lens, case.head_dim, case.kv_dtype, case.detail
            )
            cases.append(RowsCase(longer, np.full(len(lens), drafts, dtype=np.int64), 0))
    return cases
