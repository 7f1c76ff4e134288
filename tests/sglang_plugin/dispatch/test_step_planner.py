"""Decisions as values: which kind a step is, for which reason, and what a steady step reuses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sglang.srt.managers import overlap_utils
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import sgl_prefix_attn
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import StepDecision, StepKind
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import LENGTHS, SHARED, Fixture
from tests.sglang_plugin.gpu_fixture import GpuFixture, assert_same

PLUGIN = str(Path(sgl_prefix_attn.__file__).parent / "sglang_plugin")


def decide(fixture: Fixture, handed: Any = None) -> StepDecision:
    """The backend's decision on the fixture's batch."""
    fixture.prepare(handed)
    return fixture.backend.decision


class TestKinds:
    def test_routed_to_stock_without_a_reason(self) -> None:
        fixture = Fixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="stock"))
        assert decide(fixture) == StepDecision(StepKind.STOCK)

    def test_a_step_without_paths_for_a_failed_hook_is_a_fallback(self) -> None:
        fixture = Fixture(SHARED, LENGTHS)
        failed = Handed(fallback_reasons.HOOK_FAILED)
        assert decide(fixture, failed) == StepDecision(StepKind.STOCK, fallback_reasons.HOOK_FAILED)
        assert fixture.fallbacks == {fallback_reasons.HOOK_FAILED: 1}

    def test_unshared_in_a_packed_graph(self) -> None:
        fixture = GpuFixture(SHARED, LENGTHS, graphs=4, settings=Settings(metrics=False, route="packed"))
        fixture.graphs.capture(4)
        assert (fixture.backend.decision.kind, fixture.backend.decision.reason) == (StepKind.UNSHARED, None)
        fixture.graphs.replay(NOTHING)
        assert (fixture.backend.decision.kind, fixture.backend.decision.reason) == (StepKind.UNSHARED, NOTHING.paths)

    @pytest.mark.parametrize("error", [ValueError, MemoryError])
    def test_an_error_of_the_native_planner_is_a_fallback(self, error, caplog):
        fixture = Fixture(SHARED, LENGTHS)
        fixture.backend._layers.scan_model()
        fixture.backend._executor.planners[0]._native = SimpleNamespace(plan=Mock(side_effect=error("no plan")))
        for _ in range(2):
            assert decide(fixture) == StepDecision(StepKind.STOCK, fallback_reasons.PLAN_REFUSED)
        assert fixture.stock.metadata_calls == 2
        assert sum(record.exc_info is not None for record in caplog.records) == 1


class TestSteadySteps:
    def test_the_decision_itself_is_reused_until_the_planner_has_to_see_the_batch(self) -> None:
        fixture = GpuFixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="packed"))
        decisions = []
        for _ in range(STEPS_BETWEEN_PLANS + 1):
            decisions.append(decide(fixture))
            fixture.grow(1)
        assert len(set(map(id, decisions))) == 2
        assert decisions[0] is decisions[STEPS_BETWEEN_PLANS - 1]
        assert decisions[0] is not decisions[STEPS_BETWEEN_PLANS]
        counters = fixture.state.counters
        assert counters.plans_made + counters.plans_reused == counters.steps_packed["decode"] == len(decisions)

    def test_each_microbatch_of_a_pipeline_reuses_its_own_decision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two take turns, one of which shares nothing. A new policy decides about both."""
        arguments = SimpleNamespace(chunked_prefill_size=64, pp_size=2)
        fixture = GpuFixture(SHARED, LENGTHS, settings=Settings(metrics=False, route="packed"), server_args=arguments)
        alone = dataclasses.replace(fixture.step, forest=PrefixForest.from_paths([[]] * len(LENGTHS)))
        of_batch: dict[str, list[StepDecision]] = {"shared": [], "alone": []}

        def turn() -> None:
            for step, decisions in zip((fixture.step, alone), of_batch.values(), strict=True):
                assert_same(fixture.run(fixture.handed._replace(paths=step)), fixture.run_stock())
                decisions.append(fixture.backend.decision)
            fixture.grow(1)

        for _ in range(STEPS_BETWEEN_PLANS + 1):
            turn()
        for decisions in of_batch.values():
            assert len(set(map(id, decisions))) == 2
            assert decisions[0] is decisions[STEPS_BETWEEN_PLANS - 1]
        router = fixture.backend._step_planner._router
        monkeypatch.setattr(router, "watches_steps", True)
        monkeypatch.setattr(router, "step_begins", Mock(side_effect=[True, False]))
        turn()
        assert all(decisions[-1] is not decisions[-2] for decisions in of_batch.values())
        assert fixture.fallbacks == {}

    @pytest.mark.parametrize("make", [Fixture, GpuFixture])
    @pytest.mark.parametrize("steady", [True, False])
    def test_a_step_returns_to_no_file_of_the_plugin_more_than_twice(self, make: Any, steady: bool) -> None:
        """Files by the order in which their functions are called, to the end of the first layer."""
        fixture = make(SHARED, LENGTHS, room=64)
        step = decide(fixture).step
        fixture.grow(1)
        step.age = 0 if steady else STEPS_BETWEEN_PLANS - 1
        files: list[str] = []

        def note(frame: Any, event: str, arg: object) -> None:
            name = frame.f_code.co_filename
            if event == "call" and name.startswith(PLUGIN) and files[-1:] != [name]:
                files.append(name)

        qkv = fixture.qkv(fixture.layers[0])
        with fixture.handover.handed_over(fixture.handed):
            sys.setprofile(note)
            try:
                fixture.backend.init_forward_metadata(fixture.batch)
                fixture.backend.forward(*qkv, fixture.layers[0], fixture.batch)
            finally:
                sys.setprofile(None)
        assert fixture.backend.decision.kind is StepKind.PACKED
        assert len(set(files)) > 7
        assert max(files.count(name) - 1 for name in files) <= 2, files


class TestHostLengths:
    """Lengths in host memory cost speculation a wait for the device in each step. SGLang asks every backend."""

    def needs(self, stock: bool, make: Any = Fixture, **options: Any) -> bool:
        fixture = make(SHARED, LENGTHS, **options)
        fixture.stock.needs_cpu_seq_lens = stock
        return fixture.backend.needs_cpu_seq_lens

    @pytest.mark.parametrize("make", [Fixture, GpuFixture])
    def test_where_steps_run_packed(self, make: Any) -> None:
        assert self.needs(False, make) is True

    @pytest.mark.parametrize("stock", [False, True])
    @pytest.mark.parametrize(
        "options",
        [
            {"is_draft_worker": True},
            {"device": "cuda", "spec_algorithm": SpeculativeAlgorithm.EAGLE},
            {"settings": Settings(metrics=False, route="stock", pack_extend=False, pack_mixed=False)},
            {"settings": Settings(metrics=False, pack_decode=False, pack_extend=False, pack_mixed=False)},
        ],
        ids=["draft model", "speculation", "stock route", "nothing is to be packed"],
    )
    def test_where_nothing_packs_the_stock_backend_answers(self, options: dict[str, Any], stock: bool) -> None:
        assert self.needs(stock, **options) is stock

    def test_a_refused_pool(self) -> None:
        assert self.needs(False, kv_index_translator=SimpleNamespace(is_translating=True)) is False

    def test_routed_decode_beside_packed_prefill(self) -> None:
        assert self.needs(False, settings=Settings(metrics=False, route="stock")) is True  # on a CPU prefill packs

    @pytest.mark.skipif(not hasattr(overlap_utils, "decide_needs_cpu_seq_lens"), reason="not in this SGLang")
    def test_an_eagle_server_over_such_a_stock_backend_does_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from unittest import mock

        for name in ("get_exec", "get_spec"):
            monkeypatch.setattr(overlap_utils, name, mock.MagicMock(), raising=False)
        getattr(overlap_utils, "get_exec", mock.MagicMock())().overlap.enable_two_batch_overlap = False
        getattr(overlap_utils, "get_spec", mock.MagicMock())().speculative_algorithm = "EAGLE"
        eagle = {"device": "cuda", "spec_algorithm": SpeculativeAlgorithm.EAGLE}
        target, draft = Fixture(SHARED, LENGTHS, **eagle), Fixture(SHARED, LENGTHS, is_draft_worker=True, **eagle)
        for fixture in (target, draft):
            fixture.stock.needs_cpu_seq_lens = False  # as fa3 and triton say
        decide, backends = overlap_utils.decide_needs_cpu_seq_lens, [target.backend, draft.backend]
        if "server_args" in inspect.signature(decide).parameters:  # up to 0.5.18
            arguments = SimpleNamespace(enable_two_batch_overlap=False, speculative_algorithm="EAGLE")
            decide = functools.partial(decide, arguments)
        assert decide(backends) is False
