"""SGLang's own kit for decode graphs (sglang/test/kits/attention_unittest/runner_modes), run on the CUDA executor.

The kit pads the batch, captures, and replays the metadata against its dense reference, padded rows included; it needs
no GPU, because it runs the layers instead of replaying a graph. Device buffers compute on the CPU here (`HostStep`).
"""

from __future__ import annotations

import sys
import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.gpu_fixture import DTYPE, GraphStock, host_kernels

KITS = "sglang.test.kits.attention_unittest"
# The kit imports what it has for other kinds of attention along, which a CPU install lacks kernels for.
_OTHERS = ("dsa", "dsv4", "gdn", "kda", "lightning", "mamba2", "mla")
with mock.patch.dict(sys.modules, {f"{KITS}.attention_methods.{kind}_attention": mock.MagicMock() for kind in _OTHERS}):
    runner_kit = pytest.importorskip(f"{KITS}.runner_modes.cuda_graph_decode_runner")
dense_kit = pytest.importorskip(f"{KITS}.attention_methods.dense_attention")

NAME = "prefixpack_on_the_host"
HEAD_DIM = 64
CASES = [case for case in dense_kit.make_dense_cases(NAME) if case.forward_mode.is_decode()]


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> plugin_state.PluginState:
    settings = Settings(metrics=False)
    started = plugin_state.of_process(settings, "0.5.20")
    started.serve("hooks", None)

    def create(runner: Any) -> PrefixPackBackend:
        executor = CudaExecutor(runner, settings, host_kernels())
        return PrefixPackBackend(runner, GraphStock(runner), started, executor)

    def with_model(*args: Any, **kwargs: Any) -> Any:
        fixture = dense_kit.build_dense_attention_fixture(*args, **kwargs)
        fixture.runner.model = fixture.actual_module  # the kit's runner has none, and layers are looked for there
        return fixture

    monkeypatch.setitem(ATTENTION_BACKENDS, NAME, create)
    monkeypatch.setattr(runner_kit, "build_dense_attention_fixture", with_model)
    return started


def run(case: Any, capture_batch: int) -> None:
    runner_kit.run_dense_cuda_graph_decode_case(
        unittest.TestCase(),
        case,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        device="cpu",
        cuda_graph_capture_batch_size=capture_batch,
    )


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_paths(case: Any, padding: int, current: plugin_state.PluginState) -> None:
    run(case, case.batch_size + padding)
    assert set(current.counters.fallbacks) == {fallback_reasons.NO_PATHS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_with_paths(case: Any, current: plugin_state.PluginState) -> None:
    # Every request's prefix is a node of its own: the kit gives its requests nothing in common.
    paths = [[(request, 0, prefix)] if prefix else [] for request, prefix in enumerate(case.prefix_lens)]
    step = StepPaths(PrefixForest.from_paths(paths), "decode", case.batch_size, case.batch_size)
    seq_lens = torch.tensor(case.prefix_lens) + 1
    with current.handover.handed_over(Handed(step, None, seq_lens)):
        run(case, case.batch_size)
    assert current.counters.steps_packed["decode"] == 2  # the eager step and the replay
    assert not current.counters.fallbacks
