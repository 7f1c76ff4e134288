"""Eager steps on CUDA without a GPU: what is loaded and prepared when, and that the numbers are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import STOCK
from sgl_prefix_attn.sglang_plugin.doctor.diagnosis import _step
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import LAYERS
from tests.sglang_plugin.gpu_fixture import LENGTHS, SHARED, GpuFixture, assert_same, decode, extend, out_of_memory


class TestEagerSteps:
    def test_decode_runs_packed(self) -> None:
        fixture = decode()
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {}
        assert fixture.stock.metadata_calls == fixture.stock.layer_calls == 0
        assert (len(fixture.device_step.loads), fixture.device_step.prepared) == (1, 1)
        assert fixture.device_step.attended == LAYERS
        assert fixture.state.counters.kv_tokens_read < fixture.state.counters.kv_tokens_per_request

    def test_extend_stays_with_the_stock_backend(self) -> None:
        fixture = extend()
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.COMPUTE_BOUND: 1}
        assert fixture.stock.metadata_calls == 1
        assert fixture.stock.layer_calls == LAYERS
        why_stock = fixture.handover._tracker.why_stock
        expected = [None, *[fallback_reasons.COMPUTE_BOUND] * 2]
        assert [why_stock(mode) for mode in ("decode", "extend", "mixed")] == expected

    @pytest.mark.parametrize("route", ["auto", "stock"])
    @pytest.mark.parametrize(("paths", "mixes", "chunk", "head_dim"), [
        (SHARED, True, 64, 128), ([[]] * 4, True, 64, 128), (SHARED, False, 64, 128), (SHARED, True, -1, 128),
        (SHARED, True, 64, 64),
    ])  # fmt: skip
    def test_a_mixed_step_runs_packed_where_requests_share(self, paths, mixes, chunk, head_dim, route) -> None:
        arguments = SimpleNamespace(chunked_prefill_size=chunk, enable_mixed_chunk=mixes)
        options = {"server_args": arguments, "settings": Settings(metrics=False, route=route), "head_dim": head_dim}
        fixture = GpuFixture(paths, LENGTHS, [4, 1, 1, 1], mixed=True, **options)
        assert_same(fixture.run(), fixture.run_stock())
        mixes = mixes and chunk > 0 and route == "auto"
        assert fixture.executor._prefill_tokens == (chunk if mixes else 0)
        assert bool(_step(fixture.executor, options["settings"], "mixed", fixture.facts, None).note) == mixes
        packed = paths == SHARED and mixes and head_dim == 128
        assert fixture.fallbacks == ({} if packed else {fallback_reasons.COMPUTE_BOUND: 1})

    def test_rows_that_a_prefill_graph_pads_come_out_as_zeros(self) -> None:
        fixture = extend(settings=Settings(metrics=False, pack_extend=True))
        layer = fixture.layers[0]
        q, k, v = fixture.qkv(layer)
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            out = fixture.backend.forward(torch.cat([q, q[:3]]), k, v, layer, fixture.batch)
        assert_same([out[: len(q)]], fixture.run_stock()[:1])
        assert not out[len(q) :].any()
        assert fixture.fallbacks == {}

    def test_tails_never_outgrow_their_room_before_a_new_plan_is_loaded(self) -> None:
        fixture = decode(settings=Settings(metrics=False, replan_growth=5))
        for _ in range(40):
            fixture.run()  # HostStep refuses a tail beyond what the plan was loaded with
            fixture.grow(1)
        assert len(fixture.device_step.loads) > 1

    def test_without_memory_for_buffers_the_server_goes_on_with_the_stock_backend(self, caplog):
        fixture = decode()
        out_of_memory(fixture)
        for _ in range(2):
            assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.NO_MEMORY: 2}
        assert caplog.text.count("no memory for the buffers") == 1

    def test_steps_that_other_backends_ran_meanwhile_are_noticed(self) -> None:
        fixture = decode(room=256)
        fixture.run()
        for tokens in (100, 2, 0):  # one is what a step of ours adds
            fixture.grow(tokens)
            # HostStep refuses a tail beyond what the plan was loaded with.
            assert_same(fixture.run(), fixture.run_stock())
            assert fixture.backend.decision.step.age == 0
        fixture.grow(1)
        fixture.run()
        assert fixture.backend.decision.step.age == 1

    def test_a_step_in_place_of_its_lengths_keeps_those_it_was_planned_for(self) -> None:
        fixture = decode()
        fixture.run()
        step = fixture.backend.decision.step
        planned = step.host_lens.copy()
        fixture.batch.seq_lens_cpu += 1  # as SGLang does with the static lengths of its graphs
        assert step.host_lens.tolist() == planned.tolist()

    def test_a_plan_that_does_not_fit_goes_to_the_stock_backend(self, caplog: pytest.LogCaptureFixture) -> None:
        fixture = decode()
        fixture.run()
        fixture.grow(1)
        fixture.backend.decision = STOCK
        fixture.executor._shapes[0].loaded = None
        fixture.device_step.limits = SimpleNamespace(queries=64, items=64, kv_slots=100, partials=64)
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.PLAN_TOO_LARGE: 1}
        assert "kv_slots; the buffers hold 100" in caplog.text
        assert fixture.stock.layer_calls == LAYERS

    def test_other_lengths_than_announced_are_another_batch(self) -> None:
        fixture = decode()
        lens = fixture.batch.seq_lens_cpu.clone()
        lens[1] += 1
        assert_same(fixture.run(Handed(fixture.step, fixture.batch.req_pool_indices, lens)), fixture.run_stock())
        assert fixture.fallbacks == {fallback_reasons.ROW_MISMATCH: 1}

    def test_no_tensor_of_the_device_is_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = decode()
        fixture.run()
        fixture.grow(1)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("this waits for the device")

        for name in ("item", "tolist", "cpu", "equal", "__bool__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        monkeypatch.setattr(torch, "equal", refuse)
        fixture.prepare()
        fixture.backend.decision = STOCK
        fixture.prepare()
        monkeypatch.undo()
        assert fixture.fallbacks == {}
        assert fixture.device_step.prepared == 3
