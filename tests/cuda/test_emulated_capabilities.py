"""The kernels as compiled for GPUs without WGMMA, and with little shared memory, emulated: against dense attention."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from sgl_prefix_attn import _native
from tests.cuda.cases import check, decode_batch, document, make_case
from tests.cuda.emulated import GROWTH, emulate, same_bits, with_tile_rows

FP8 = torch.float8_e4m3fn
FAN_IN = 5  # most splits of a tile that are combined in one level; the kernels' own is 16
GROUPS = ((2, 2), (8, 2), (8, 1), (16, 1), (24, 2), (11, 1), (5, 1), (32, 1))


def test_shared_memory_that_gpus_have() -> None:
    """Of a CTA and an SM: CUDA programming guide. The system reserves 1 KiB of each CTA's."""
    rooms = {80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
    for capability, (of_cta, of_sm) in rooms.items():
        ctas = _native.ctas_per_sm(capability)
        for needed in (_native.cta_shared_bytes(capability), 14 * 1024 * _native.cta_warps(capability)):
            assert needed <= of_cta * 1024
            assert ctas * (needed + 1024) <= of_sm * 1024
            assert (ctas + 1) * (needed + 1024) > of_sm * 1024


@pytest.mark.parametrize("shared", [200, 700])
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["16 bits", "fp8"])
@pytest.mark.parametrize(
    ("head_dim", "rows"), [(64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (256, 32), (256, 64)]
)
def test_every_tile(emulation_without_wgmma, head_dim, rows, kv_dtype, shared):
    """Full tiles of more KV tiles than the ring holds, whole and split."""
    batch = decode_batch(shared + np.arange(1, rows // 8 + 1), shared)
    case = make_case(
        rows, heads=(8, 1), head_dim=head_dim, kv_dtype=kv_dtype, batch=batch, num_sms=1 if shared < 300 else 132,
        dtype=torch.bfloat16 if rows > 32 else torch.float16, v_scale=0.37 if kv_dtype else 1.0,
    )  # fmt: skip
    case = with_tile_rows(case, rows)
    assert (case.plan.items[:, 6] == rows).any()
    for late_copies in (False, True) if shared < 300 else (True,):
        check(case, emulate(emulation_without_wgmma, case, late_copies=late_copies, fan_in=FAN_IN))


@pytest.mark.parametrize("seed", range(24))
def test_drawn_steps(emulation_without_wgmma: ModuleType, seed: int) -> None:
    """Head sizes, types, groups, KV splits, windows, sinks, extend, trees; the same bits whoever arrives last."""
    rng = np.random.default_rng(seed)
    trees = seed % 4 == 3
    case = make_case(
        seed, heads=GROUPS[seed % len(GROUPS)], head_dim=(64, 128, 256)[seed % 3], kv_dtype=(None, FP8)[seed // 3 % 2],
        dtype=torch.bfloat16 if trees else (torch.bfloat16, torch.float16)[rng.integers(2)],
        requests=int(rng.integers(2, 5 if trees else 9)), tokens=40 if trees else int(rng.choice([40, 300])),
        max_new_tokens=int(rng.choice([17, 64])) if trees else int(rng.choice([1, 1, 40])),
        num_sms=int(rng.choice([1, 132])), window_left=int(rng.choice([-1, -1, 70])), trees=trees,
        with_sinks=bool(rng.integers(2)), grown=int(rng.choice([0, GROWTH])),
    )  # fmt: skip
    same_bits(emulation_without_wgmma, case, fan_in=FAN_IN, orders=[{"ctas": 5, "warps_first": True}])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deferred_combines(emulation_without_wgmma: ModuleType, head_dim: int) -> None:
    case = document(16, 1000, head_dim=head_dim, num_sms=10, with_sinks=True)
    words = _native.serialize_plan(case.plan, case.planned_lens, growth=0, group=8, warp_ctas=64, cta_warps=7).words
    assert words[_native.plan_header_words - 3] > 0, "combines are deferred"
    check(case, emulate(emulation_without_wgmma, case, fan_in=64, layers=2))
