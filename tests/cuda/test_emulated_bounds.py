"""Verify steps that were planned by bounds of their lengths: requests are shorter by up to the drafts not accepted."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.cuda.cases import check, decode_batch, make_case
from tests.cuda.emulated import emulate

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("by", [1, 4, 8])
@pytest.mark.parametrize("longest", [385, 1154, 1156])
def test_what_lies_behind_the_last_token_is_not_read(
    emulation: ModuleType, longest: int, by: int, kv_dtype: torch.dtype
) -> None:
    """It is NaN here. The last splits of requests are short, so that some begin behind the end."""
    batch = decode_batch([longest, longest + 3, longest + 40], new=4)
    case = make_case(1, heads=(8, 1), batch=batch, num_sms=132, kv_dtype=kv_dtype, grown=-by)
    check(case, emulate(emulation, case))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_splits_far_behind_the_end_have_no_keys(emulation: ModuleType, head_dim: int, kv_dtype: torch.dtype) -> None:
    """A tile of a warpgroup whose second half has no rows: both halves pass the same barriers."""
    batch = decode_batch([1153], new=6)
    case = make_case(1, heads=(8, 1), head_dim=head_dim, batch=batch, num_sms=132, kv_dtype=kv_dtype, grown=-200)
    assert (case.plan.items[:, 3] > 1153 - 200).any()
    check(case, emulate(emulation, case))
