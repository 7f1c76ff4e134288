"""The state of a process: one record for each backend that lives, and one object of each type it owns."""

from __future__ import annotations

import gc
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.backend.server_info import process_state
from sgl_prefix_attn.sglang_plugin.compat.cpu_fallbacks import CpuFallbacks
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import LENGTHS, SHARED, Fixture


def another(fixture: Fixture) -> Any:
    return fixture.make_backend()


def test_a_record_lives_as_long_as_its_backend() -> None:
    fixture = Fixture(SHARED, LENGTHS)
    second = another(fixture)
    assert list(fixture.state.backends) == [fixture.backend, second]
    assert fixture.state.serve(fixture.facts) is fixture.handover  # one for all backends
    del second
    gc.collect()
    assert list(fixture.state.backends) == [fixture.backend]


def test_the_backend_that_packed_is_reported_whichever_came_last() -> None:
    fixture = Fixture(SHARED, LENGTHS)
    second = another(fixture)
    assert fixture.state.reported() is second._record
    fixture.run()
    assert fixture.state.reported() is fixture.backend._record
    batch = process_state(fixture.state)["batch"]
    assert batch is not None
    assert batch["seq_lens"] == LENGTHS


def test_paths_are_read_while_one_backend_may_pack_them() -> None:
    fixture = Fixture(SHARED, LENGTHS)
    fixture.runner.is_draft_worker = True
    draft = another(fixture)
    why_stock = fixture.handover._tracker.why_stock
    assert why_stock("decode") is None
    fixture.backend._layers.why_all_stock = fallback_reasons.NO_MEMORY
    assert why_stock("decode") == fallback_reasons.NO_MEMORY
    assert fixture.state.refused[draft] == fallback_reasons.DRAFT_WORKER


def test_an_owned_object_is_made_once_and_goes_with_the_state() -> None:
    state = plugin_state.of_process(Settings(), "0.5.20")
    assert plugin_state.of_process(Settings(metrics=False), "other") is state
    fallbacks = state.own(CpuFallbacks)
    fallbacks.has_cpu_backend = True
    assert state.own(CpuFallbacks) is fallbacks
    plugin_state.reset()
    assert not plugin_state.of_process(Settings(), "0.5.20").own(CpuFallbacks).has_cpu_backend
