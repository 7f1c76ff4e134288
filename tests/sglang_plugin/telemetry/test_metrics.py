"""The Prometheus metrics of a scheduler process."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from sgl_prefix_attn.sglang_plugin.backend import server_info
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.metrics import MetricsExporter, _engine_type
from tests.sglang_plugin.fixture import LENGTHS, SHARED, Fixture


class TestMetrics:
    def exporter(self) -> tuple[MetricsExporter, CollectorRegistry]:
        registry = CollectorRegistry()
        return MetricsExporter({"model_name": "m", "tp_rank": "0"}, registry), registry

    def test_counters_follow_the_totals(self) -> None:
        exporter, registry = self.exporter()
        counters = Counters()
        for read, fallbacks in ((40, 1), (100, 4)):
            counters.kv_tokens_read, counters.kv_tokens_per_request = read, 2 * read
            counters.steps_packed["decode"] = read
            counters.fallbacks[fallback_reasons.NO_PATHS] = fallbacks
            counters.routed_steps["stock"] = 3 * fallbacks
            exporter.update(counters)
        labels = {"model_name": "m", "tp_rank": "0"}
        sample = registry.get_sample_value
        assert sample("sglang:prefixpack_kv_tokens_read_total", labels) == 100
        assert sample("sglang:prefixpack_kv_tokens_saved_total", labels) == 100
        assert sample("sglang:prefixpack_packed_steps_total", {**labels, "mode": "decode"}) == 100
        assert sample("sglang:prefixpack_routed_steps_total", {**labels, "route": "stock"}) == 12
        assert sample("sglang:prefixpack_routed_steps_total", {**labels, "route": "packed"}) == 0
        assert sample("sglang:prefixpack_fallbacks_total", {**labels, "reason": "no_paths"}) == 4
        assert sample("sglang:prefixpack_kv_read_ratio", labels) == 0.5

    @pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
    def test_engine_types_are_sglangs(self, mode: str) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        assert _engine_type(mode) == DisaggregationMode.to_engine_type(mode)

    def test_an_extra_label_gives_way_to_one_of_ours(self) -> None:
        registry = CollectorRegistry()
        counters = Counters()
        counters.steps_packed["decode"] = 3
        MetricsExporter({"mode": "production"}, registry).update(counters)
        assert registry.get_sample_value("sglang:prefixpack_packed_steps_total", {"mode": "decode"}) == 3
        assert registry.get_sample_value("sglang:prefixpack_plans_made_total", {"mode": "production"}) == 0

    def test_they_are_updated_every_few_steps_only(self) -> None:
        fixture = Fixture(SHARED, LENGTHS)
        fixture.state.exporter, registry = self.exporter()
        fixture.state.settings = fixture.state.settings.model_copy(update={"metrics_flush_steps": 3})
        labels = {"model_name": "m", "tp_rank": "0", "mode": "decode"}
        seen = []
        for _ in range(4):
            fixture.run()
            seen.append(registry.get_sample_value("sglang:prefixpack_packed_steps_total", labels))
        assert seen == [None, None, 3.0, 3.0]
        server_info.after_on_idle(None)
        assert registry.get_sample_value("sglang:prefixpack_packed_steps_total", labels) == 4.0

    def test_an_update_that_fails_is_counted_and_logged_once_and_steps_go_on(self, monkeypatch, caplog):
        fixture = Fixture(SHARED, LENGTHS)
        fixture.state.exporter, registry = self.exporter()
        fixture.state.settings = fixture.state.settings.model_copy(update={"metrics_flush_steps": 1})
        full = Mock(side_effect=OSError("no space left on device"))
        with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
            broken.setattr(fixture.state.exporter, "update", full)
            fixture.run()
            fixture.run()
            server_info.after_on_idle(None)
            result: Any = SimpleNamespace(internal_state={})
            server_info.after_get_internal_state(result)
        assert fixture.state.counters.failures.counts == {"metrics": 4}
        assert (
            result.internal_state["prefixpack"]["counters"]["failures"]["metrics"] == 3
        )  # it is asked before it is updated
        assert caplog.text.count("Traceback") == 1
        assert "prefixpack: metrics failed; they may be wrong from now on" in caplog.text
        assert fixture.fallbacks == {}  # no step left the packed path for it
        fixture.run()
        labels = {"model_name": "m", "tp_rank": "0", "mode": "decode"}
        assert registry.get_sample_value("sglang:prefixpack_packed_steps_total", labels) == 3.0

    @pytest.mark.parametrize(
        ("options", "ranks", "exports"),
        [
            ({"enable_metrics": False}, {}, False),
            ({"enable_metrics": True}, {}, True),
            ({"enable_metrics": True}, {"tp_rank": 1}, False),
            ({"enable_metrics": True}, {"tp_rank": 1, "attn_cp_rank": 0}, False),  # 0.5.14
            ({"enable_metrics": True}, {"tp_rank": 1, "attn_tp_rank": 1, "attn_cp_rank": 0}, False),
            # DP attention: each rank has a scheduler, whose metrics SGLang exports.
            ({"enable_metrics": True}, {"tp_rank": 1, "attn_tp_rank": 0, "attn_cp_rank": 0}, True),
            ({"enable_metrics": True}, {"tp_rank": 1, "attn_tp_rank": 0, "attn_cp_rank": 1}, False),
            ({"enable_metrics": True, "enable_metrics_for_all_schedulers": True}, {"tp_rank": 1}, True),
        ],
    )
    def test_who_exports(self, options, ranks, exports, monkeypatch):
        arguments = SimpleNamespace(
            served_model_name="m",
            model_path="p",
            disaggregation_mode="null",
            extra_metric_labels={"rack": 7},
            **options,
        )  # fmt: skip
        ranks = SimpleNamespace(**{"tp_rank": 0, "pp_rank": 0, "dp_rank": None, **ranks})
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: ranks)
        for holder in (ranks, None):
            exporter = MetricsExporter.of_server(arguments, holder)
            assert (exporter is not None) == exports
            if exporter is not None:
                known = {"model_name": "m", "engine_type": "unified", "pp_rank": "0", "moe_ep_rank": "0", "rack": "7"}
                assert exporter.labels == {**known, "tp_rank": str(ranks.tp_rank)}
