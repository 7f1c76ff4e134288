"""SGLang's own conformance kit for attention backends (sglang/test/kits/attention_unittest), run on `prefixpack`.

The kit builds a small model runner, KV pool and ForwardBatch without a scheduler, runs one attention layer on the CPU,
and compares with its own dense reference. Without a scheduler there are no request paths, and each step would run on
the stock backend. The tests therefore hand paths over as the scheduler's hooks do: one node for the prefix of each
request, and, beyond the kit, requests that share the KV slots of a common prefix.

Left out: `runner_modes/` (CUDA graphs and speculative decoding, which run on the stock backend), and the layers that
prefixpack refuses or never sees (MLA, DSA, GDN, KDA, Mamba, lightning).
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn.core.forest import PrefixForest, Segment
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.startup import entry
from tests.sglang_plugin.fixture import active_state

kit = pytest.importorskip("sglang.test.kits.attention_unittest.attention_methods.dense_attention")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang runs its CPU path only where there is no GPU"),
]

CASES = [
    *kit.make_dense_cases("prefixpack"),
    *kit.make_swa_no_prefix_input_config_cases("prefixpack"),
    *kit.make_swa_prefix_input_config_cases("prefixpack"),
]
LAYOUTS = ("contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    entry.register_name(Settings())
    yield
    plugin_state.reset()


def paths_of(case: Any, shared: int) -> StepPaths:
    """What the tracker would say of the kit's batch when the first `shared` positions of all requests are one node."""
    paths: list[list[Segment]] = []
    for request, prefix in enumerate(case.prefix_lens):
        segments = [(0, 0, shared), (request + 1, shared, prefix)]
        paths.append([segment for segment in segments if segment[1] < segment[2]])
    decode = case.forward_mode.is_decode()
    forest = PrefixForest.from_paths(paths, prefix_lens=case.prefix_lens)
    return StepPaths(
        forest=forest, mode="decode" if decode else "extend", num_requests=case.batch_size,
        query_lens=None if decode else np.asarray(case.extend_lens, dtype=np.int64),
    )  # fmt: skip


def share_beginning(fixture: Any, shared: int) -> None:
    """Give all requests of the kit's batch the first `shared` tokens and KV slots of the first request."""
    table = fixture.runner.req_to_token_pool.req_to_token
    for request in range(1, fixture.case.batch_size):
        table[request, :shared] = table[0, :shared]
        fixture.prefix_hidden[request][:shared] = fixture.prefix_hidden[0][:shared]


@torch.no_grad()
def run_packed(
    case: Any, *, shared: int = 0, dtype: torch.dtype = torch.float32, layout: str = "shuffled_pages"
) -> None:
    try:
        fixture = kit.build_dense_attention_fixture(
            unittest.TestCase(), case, dtype=dtype, device="cpu", loc_layout=layout, head_dim=kit.DEFAULT_HEAD_DIM
        )
    except unittest.SkipTest as reason:  # the kit skips if the backend cannot be built
        pytest.fail(str(reason))
    share_beginning(fixture, shared)
    current = active_state()
    assert current.handover is not None
    steps, fallbacks = sum(current.counters.steps_packed.values()), dict(current.counters.fallbacks)
    with current.handover.handed_over(Handed(paths_of(case, shared), fixture.forward_batch.req_pool_indices)):
        actual = kit.run_dense_fixture_eager(fixture)
    expected = kit.expected_dense_fixture_output(fixture)
    torch.testing.assert_close(actual, expected, atol=kit.DENSE_ATOL, rtol=kit.DENSE_RTOL)
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert sum(current.counters.steps_packed.values()) == steps + 1
    assert dict(current.counters.fallbacks) == fallbacks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_of_the_kit(case: Any, dtype: torch.dtype) -> None:
    run_packed(case, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [case for case in CASES if case.batch_size > 1], ids=lambda case: case.name)
def test_layouts_of_kv_slots(case: Any, layout: str) -> None:
    run_packed(case, layout=layout)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.batch_size > 1 and min(case.prefix_lens) > 0], ids=lambda case: case.name
)
def test_case_of_the_kit_with_a_shared_beginning(case: Any) -> None:
    run_packed(case, shared=min(case.prefix_lens))
