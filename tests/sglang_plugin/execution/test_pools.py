"""KV pools: full layers beside sliding-window layers with slots of their own, and every pool that is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool, swa_memory_pool

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend.eligibility import unsupported_kv
from sgl_prefix_attn.sglang_plugin.backend.server_info import process_state
from sgl_prefix_attn.sglang_plugin.dispatch import graph_variants
from sgl_prefix_attn.sglang_plugin.execution import pool_support
from sgl_prefix_attn.sglang_plugin.execution.layer_support import unsupported_buffers
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin import gpu_fixture
from tests.sglang_plugin.backend.test_backend import assert_same, decode, extend, mixed
from tests.sglang_plugin.fixture import LAYERS
from tests.sglang_plugin.gpu_fixture import DecodeGraphs, GpuFixture
from tests.support.server_facts import server_facts

WINDOW = 64
WINDOW_LAYER = 0


def hybrid(make: Any, **options: Any) -> Any:
    """A fixture whose first layer sees a window and keeps its KV in the window pool; the second sees everything."""
    fixture = make(windows=(WINDOW_LAYER,), **options)
    fixture.layers[WINDOW_LAYER].sliding_window_size = WINDOW
    return fixture


def test_the_window_pool_holds_another_content_than_the_full_one() -> None:
    """Otherwise a wrong pool would go unnoticed below."""
    pool = hybrid(decode).pool
    assert not torch.equal(pool.full_kv_pool.k_buffer[0], pool.swa_kv_pool.k_buffer[0])


class TestHybridModels:
    @pytest.mark.parametrize("make", [decode, extend, mixed])
    def test_full_layers_run_packed_and_window_layers_stock(self, make: Any) -> None:
        fixture = hybrid(make)
        assert_same(fixture.run(), fixture.run_stock())
        assert sum(fixture.state.counters.steps_packed.values()) == 1
        assert (fixture.stock.metadata_calls, fixture.stock.layer_calls) == (1, 1)
        assert fixture.fallbacks == {}, "the stock backend is where window layers belong"

    def test_window_slots_that_were_given_up_do_not_matter_to_full_layers(self) -> None:
        fixture = hybrid(decode)
        _, expected = fixture.run_stock()
        fixture.pool.swa_kv_pool.k_buffer[0].fill_(torch.nan)
        fixture.pool.full_to_swa_index_mapping.zero_()
        torch.testing.assert_close(fixture.run()[1], expected, rtol=2e-5, atol=2e-5)

    def test_the_server_tells_which_layers_are_packed(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO"):
            fixture = hybrid(decode)
            fixture.run()
        assert process_state(fixture.state)["layers"] == {"packed": 1, "stock": {"hybrid_swa": 1}}
        assert f"1 of {LAYERS} attention layers run packed" in caplog.text

    def test_a_model_of_window_layers_only_is_never_packed(self) -> None:
        fixture = decode(windows=tuple(range(LAYERS)))
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.backend._layers.why_all_stock == reasons.HYBRID_SWA
        assert fixture.fallbacks == {reasons.HYBRID_SWA: 1}

    def test_other_reasons_go_before_that_of_window_layers(self) -> None:
        """Gemma 4: its full layers have a head size of 512. The kernels end at 256."""
        fixture = decode(windows=(WINDOW_LAYER,))
        fixture.layers[1].qk_head_dim = fixture.layers[1].v_head_dim = 512
        fixture.backend._layers.scan_model()
        assert fixture.backend._layers.why_all_stock == reasons.HEAD_DIM


class TestFamilies:
    """Layers as the models of two families build them."""

    @pytest.mark.parametrize(("windows", "reason"), [((0,), reasons.HYBRID_SWA), ((), reasons.LAYER_VARIANT)])
    def test_llama_4(self, windows: tuple[int, ...], reason: reasons.Reason) -> None:
        """Layers with rotary positions attend in chunks (`use_irope`) and have window slots; each fourth is global."""
        fixture = decode(windows=windows)
        fixture.layers[:] = [RadixAttention(4, 32, 32**-0.5, 2, i, use_irope=i == 0) for i in range(LAYERS)]
        assert [fixture.backend._layers.facts(layer).unsupported_reason for layer in fixture.layers] == [reason, None]

    def test_sinks_over_head_dim_64_on_the_gpu_path(self) -> None:
        """GPT-OSS passes a learned logit for each query head, which joins the softmax's denominator."""
        fixture = hybrid(gpu_fixture.decode, head_dim=64)
        layer = fixture.layers[1]
        sinks = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.bfloat16)
        fixture.prepare()
        out = fixture.backend.forward(*fixture.qkv(layer), layer, fixture.batch, sinks=sinks)
        assert fixture.fallbacks == {}
        assert fixture.device_step.attended == 1
        torch.testing.assert_close(out.double(), fixture.dense(layer, sinks=sinks.float()), rtol=2e-2, atol=2e-2)


class TestGraphs:
    def capture(self, route: str, stock: str = "fa3") -> GpuFixture:
        settings = Settings(metrics=False, route=route)
        fixture: GpuFixture = hybrid(gpu_fixture.decode, settings=settings, stock_backend=stock)
        fixture.graphs = DecodeGraphs(fixture, 8)
        for size in (8, 4):
            fixture.graphs.capture(size)
        return fixture

    @pytest.mark.parametrize(("route", "packed_steps"), [("batch>=1", 1), ("batch>=100", 0)])
    def test_both_variants_give_the_numbers_with_stock_metadata_at_each_replay(self, route, packed_steps):
        fixture = self.capture(route)
        assert fixture.backend.graph_variants.sizes == [4, 8]
        for size in (4, 8):
            before = len(fixture.stock.graph_calls)
            gpu_fixture.assert_same(fixture.graphs.replay(size=size), fixture.run_stock())
            assert fixture.stock.graph_calls[before:] == ["replay"]
        assert (fixture.state.counters.steps_packed["decode"] > 0) == bool(packed_steps)
        assert fixture.fallbacks == {}

    def test_a_stock_backend_with_metadata_of_one_graph_a_size_has_no_second_graph(self) -> None:
        fixture = self.capture("batch>=1", stock="flashinfer")
        assert fixture.backend._step_planner._router.may_change("decode")
        assert not any(key.variant_label == graph_variants.LABEL for key in fixture.graphs.graphs)
        gpu_fixture.assert_same(fixture.graphs.replay(), fixture.run_stock())


def pool_named(name: str, **attributes: Any) -> Any:
    """An object of a class with a name."""
    return type(name, (SimpleNamespace,), {})(**attributes)


class TestRefusedPools:
    """A pool that the packed path would misread goes to the stock backend, from before the first buffer is read."""

    def test_all_classes_of_the_installed_sglang(self) -> None:
        """Allowed is what was read, by name. Each further class of pool, a later SGLang's too, is refused."""
        found = {
            name
            for module in (memory_pool, swa_memory_pool)
            for name, member in vars(module).items()
            if isinstance(member, type) and issubclass(member, memory_pool.KVCache)
        }
        assert found > pool_support.PLAIN_POOLS | {"SWAKVPool", "HybridLinearKVPool"}
        inside = pool_named("MHATokenToKVPool")
        pools = {name: pool_named(name, full_kv_pool=inside, main_pool=inside) for name in found}
        accepted = {name for name, pool in pools.items() if pool_support.unsupported_pool(pool) is None}
        assert accepted <= pool_support.PLAIN_POOLS | set(pool_support.COMPOSITE_POOLS)

    @pytest.mark.parametrize(
        ("pool", "reason"),
        [
            (pool_named("UnifiedMHATokenToKVPool"), reasons.VIRTUAL_SLOTS),
            (pool_named("UnifiedSWAKVPool", full_kv_pool=pool_named("UnifiedMHATokenToKVPool")), reasons.VIRTUAL_SLOTS),
            (pool_named("HybridLinearKVPool", full_kv_pool=pool_named("UnifiedPool")), reasons.VIRTUAL_SLOTS),
            (pool_named("PageMajorMHATokenToKVPool"), reasons.KV_LAYOUT),
            (pool_named("HiSparseMHAMainPool"), reasons.KV_LAYOUT),
            (pool_named("NoOpMHATokenToKVPool"), reasons.KV_LAYOUT),
            (pool_named("SWAKVPool", full_kv_pool=pool_named("MLATokenToKVPool")), reasons.KV_LAYOUT),
            (pool_named("MHATokenToKVPool", use_hnd=True), reasons.KV_LAYOUT),
            (pool_named("MHATokenToKVPool", kv_cache_layout="hnd"), reasons.KV_LAYOUT),
            (pool_named("MHATokenToKVPool", kv_cache_layout="vectorized_5d"), reasons.KV_LAYOUT),
            (pool_named("MHATokenToKVPoolFP4", k_scale_buffer=[]), reasons.KV_DTYPE),
            (pool_named("SWAKVPool", full_kv_pool=pool_named("MHATokenToKVPool", k_scale_buffer=[])), reasons.KV_DTYPE),
            (pool_named("MHATokenToKVPool", is_quantized_kv_cache=True), reasons.KV_DTYPE),
            (pool_named("SomebodysPool"), reasons.KV_LAYOUT),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, SimpleNamespace) else str(value),
    )
    def test_known_pools(self, pool: Any, reason: reasons.Reason) -> None:
        assert pool_support.unsupported_pool(pool) == reason
        assert unsupported_kv(server_facts(token_to_kv_pool=pool)) == reason

    @pytest.mark.parametrize(
        ("k_cache", "v_cache", "reason"),
        [
            (torch.zeros(4, 2, 32), torch.zeros(4, 2, 32), None),
            ((torch.zeros(4, 2, 32),), torch.zeros(4, 2, 32), reasons.KV_LAYOUT),
            (torch.zeros(4, 2, 1, 32), torch.zeros(4, 2, 1, 32), reasons.KV_LAYOUT),
            (torch.zeros(4, 2, 32), torch.zeros(4, 32, 2).transpose(1, 2), reasons.KV_LAYOUT),
            (torch.zeros(4, 2, 32), torch.zeros(4, 2, 32).half(), reasons.KV_DTYPE),
            (torch.zeros(4, 2, 32).double(), torch.zeros(4, 2, 32).double(), reasons.KV_DTYPE),
        ],
        ids=["plain", "tuple", "pages", "strided", "two types", "fp64"],
    )
    def test_buffers(self, k_cache: Any, v_cache: Any, reason: reasons.Reason | None) -> None:
        layer = SimpleNamespace(tp_k_head_num=2, qk_head_dim=32)
        assert unsupported_buffers(layer, k_cache, v_cache) == reason

    def test_an_idle_translator_of_ids_is_none(self) -> None:
        fixture = decode(kv_index_translator=SimpleNamespace(is_translating=False))
        assert unsupported_kv(fixture.facts) is None

    def test_pages_by_head(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The real pool under SGLang's switch: stock itself cannot read it here, so no layer runs."""
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        pool = memory_pool.MHATokenToKVPool(16, 1, torch.float32, 2, 32, 1, "cpu", False, enable_alt_stream=False)
        if pool.get_key_buffer(0).dim() == 3:
            pytest.skip("this SGLang has no such layout")
        assert pool_support.unsupported_pool(pool) == reasons.KV_LAYOUT

    def test_a_layer_that_the_hybrid_pool_does_not_know(self) -> None:
        pool = hybrid(decode).pool
        assert pool_support.unsupported_slots(pool, SimpleNamespace(layer_id=7)) == reasons.KV_LAYOUT

    def test_a_refused_pool_is_never_asked_for_buffers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = decode()
        fixture.pool.kv_cache_layout = "vectorized_5d"
        monkeypatch.setattr(fixture.pool, "get_key_buffer", lambda layer_id: pytest.fail("asked"))
        fixture.backend._layers.scan_model()
        assert fixture.backend._layers.unsupported_reasons() == {reasons.KV_LAYOUT}
