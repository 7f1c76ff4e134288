"""Servers, layers and shapes that may run packed on CUDA."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import eligibility
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.gpu_fixture import decode, graphs, host_kernels


class TestEligibility:
    @pytest.fixture(autouse=True)
    def _kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eligibility, "choose_kernels", lambda setting, device: host_kernels())

    def executor(self, **arguments: Any) -> Any:
        fixture = decode(device="cuda", server_args=SimpleNamespace(**arguments))
        return eligibility.make_executor(fixture.facts, Settings(), "")

    def test_plans_are_not_left_to_a_graph_of_the_work_before_a_replay(self, monkeypatch, caplog):
        from sglang.srt.environ import envs

        if not hasattr(envs, versions.GLUE_VARIABLE):
            pytest.skip("SGLang has these graphs from 0.5.19 on")
        switch = envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH
        self.executor()
        assert versions.GLUE_VARIABLE not in os.environ
        monkeypatch.setenv(versions.GLUE_VARIABLE, "1")
        assert self.executor(disable_radix_cache=True) == fallback_reasons.NO_RADIX_CACHE
        assert switch.get(), "nothing of ours is in the graphs of a server that never packs"
        self.executor()
        assert not switch.get()
        assert f"{versions.GLUE_VARIABLE} is switched off" in caplog.text

    def test_a_query_of_another_type_than_the_cache(self) -> None:
        fixture = decode()
        layer = fixture.layers[0]
        with fixture.handover.handed_over(fixture.handed):
            fixture.backend.init_forward_metadata(fixture.batch)
            fixture.backend.forward(*fixture.qkv(layer, torch.float32), layer, fixture.batch)
        assert fixture.fallbacks == {fallback_reasons.QUERY_DTYPE: 1}

    def test_a_shape_that_shows_up_late(self) -> None:
        fixture = graphs(4)
        late = SimpleNamespace(**vars(fixture.layers[0]))
        late.tp_q_head_num = 8
        assert fixture.backend._layers.facts(late).unsupported_reason == fallback_reasons.LATE_LAYER
