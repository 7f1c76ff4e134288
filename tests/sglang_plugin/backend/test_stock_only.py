"""Servers none of whose layers can run packed: nothing of ours stays in their steps, whenever that becomes known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.server_info import process_state
from sgl_prefix_attn.sglang_plugin.backend.stock_only import StockOnly
from sgl_prefix_attn.sglang_plugin.backend.stock_proxy import StockProxy
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor
from sgl_prefix_attn.sglang_plugin.prefix.handover import HandoverHooks
from sgl_prefix_attn.sglang_plugin.startup import factory
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.backend.test_backend import assert_same
from tests.sglang_plugin.fixture import LENGTHS, SHARED, Fixture, active_state

ODD_HEADS = 24


def hidden(**options: Any) -> Fixture:
    """A model of unsupported layers that it does not show: they are known after a step has called them."""
    return Fixture(SHARED, LENGTHS, head_dim=ODD_HEADS, model=None, **options)


def grown(fixture: Fixture) -> None:
    """The next decode step of the fixture's requests; the batch is another, so it is planned anew."""
    fixture.batch.seq_lens = fixture.batch.seq_lens + 1
    fixture.batch.seq_lens_cpu = fixture.batch.seq_lens_cpu + 1
    fixture.batch.seq_lens_sum += len(LENGTHS)
    fixture.handed = fixture.handed._replace(
        seq_lens=fixture.batch.seq_lens_cpu,
        paths=SimpleNamespace(**vars(fixture.step)),  # type: ignore[arg-type]
    )


def run_steps(fixture: Fixture, count: int) -> None:
    for _ in range(count):
        fixture.run()
        grown(fixture)


def bypassed(backend: StockProxy) -> bool:
    return bool(backend.forward == backend.stock.forward)


def test_a_model_that_shows_its_layers_gets_no_hooks(asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    runner = Fixture(SHARED, LENGTHS, head_dim=ODD_HEADS).runner
    plugin_state.reset()
    backend = factory.create_backend(runner, Settings(metrics=False))
    assert isinstance(backend, StockOnly)
    assert fallback_reasons.HEAD_DIM.text in caplog.text
    of_steps = {hook.target for hook in factory.hook_table.handover_hooks(HandoverHooks())}
    assert not of_steps & {hook.target for hook in asked}
    state = active_state()
    assert process_state(state)["refused"] == "head_dim"
    assert not isinstance(backend, PrefixPackBackend)
    assert (list(state.backends), list(state.refused)) == ([], [backend])


def test_a_refused_server_runs_the_stock_backends_steps_and_counts_them() -> None:
    fixture = Fixture(SHARED, LENGTHS, is_draft_worker=True)
    assert isinstance(fixture.backend, StockOnly)
    assert bypassed(fixture.backend)
    assert_same(fixture.run(), fixture.run_stock())
    assert fixture.fallbacks == {fallback_reasons.DRAFT_WORKER: 1}
    assert fixture.state.refusal() is fallback_reasons.DRAFT_WORKER


def test_a_model_that_hides_its_layers_is_left_alone_after_a_step(caplog: pytest.LogCaptureFixture) -> None:
    fixture = hidden()
    hooks = fixture.state.handover_hooks
    assert_same(fixture.run(), fixture.run_stock())
    assert hooks.active is fixture.handover
    assert process_state(fixture.state)["refused"] is None
    grown(fixture)
    assert_same(fixture.run(), fixture.run_stock())
    assert bypassed(fixture.backend)
    assert hooks.active is None
    assert process_state(fixture.state)["refused"] == "head_dim"
    assert caplog.text.count("all steps run on the stock backend from now on") == 1
    before = fixture.fallbacks[fallback_reasons.HEAD_DIM]
    assert_same(fixture.run(), fixture.run_stock())
    assert fixture.fallbacks[fallback_reasons.HEAD_DIM] == before + 1, "a step is one fallback"


def test_a_sealed_executor_without_layers_gives_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: replayed graphs never call a layer of ours, and buffers of a shape found later do not come."""
    monkeypatch.setattr(CpuExecutor, "runs_in_graphs", True)
    fixture = hidden()
    fixture.backend._layers.scan_model()
    fixture.run()
    assert bypassed(fixture.backend)
    assert fixture.state.handover_hooks.active is None
    assert process_state(fixture.state)["refused"] == "late_layer"


def test_buffers_without_memory_end_packing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(SHARED, LENGTHS)
    monkeypatch.setattr(fixture.backend._executor, "shape_index", Mock(side_effect=torch.OutOfMemoryError))
    assert_same(fixture.run(), fixture.run_stock())
    assert bypassed(fixture.backend)
    assert fixture.fallbacks == {fallback_reasons.NO_MEMORY: 1}


def test_a_layer_that_packs_keeps_a_model_with_others() -> None:
    fixture = Fixture(SHARED, LENGTHS, model=None)
    fixture.layers[0].logit_cap, fixture.layers[0].logit_capping_method = 30.0, "rational"
    run_steps(fixture, 3)
    assert not bypassed(fixture.backend)
    assert fixture.state.counters.steps_packed["decode"] == 3


def test_another_backend_that_packs_keeps_the_hooks() -> None:
    """Prefill and decode have backends of their own."""
    fixture = hidden()
    second = fixture.make_backend(fixture.make_stock())
    run_steps(fixture, 2)
    assert fixture.state.handover_hooks.active is fixture.handover
    assert not bypassed(fixture.backend)
    fixture.backend, fixture.stock = second, second.stock
    run_steps(fixture, 2)
    assert fixture.state.handover_hooks.active is None
    assert all(map(bypassed, fixture.state.backends))


def test_a_backend_that_comes_later_and_may_pack_gets_paths() -> None:
    fixture = hidden()
    run_steps(fixture, 2)
    later = fixture.make_backend(fixture.make_stock())
    assert fixture.state.handover_hooks.active is fixture.handover
    assert fixture.state.why_stock("decode") is None
    assert not bypassed(later)


def test_one_token_steps_stay() -> None:
    """The ranks make them together, and one alone may lack memory."""
    fixture = hidden()
    fixture.handover.run_one_token_steps()
    run_steps(fixture, 2)
    assert bypassed(fixture.backend)
    assert fixture.state.handover_hooks.active is fixture.handover
