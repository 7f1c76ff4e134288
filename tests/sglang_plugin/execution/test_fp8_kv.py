"""Servers with `--kv-cache-dtype fp8_e4m3`: what runs packed, and which scales count when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import knows_kv_scales
from sgl_prefix_attn.sglang_plugin.execution.layer_support import KvScales, kv_scales
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import KV_HEADS, LENGTHS, SHARED, Fixture
from tests.sglang_plugin.gpu_fixture import DTYPE, GpuFixture, host_kernels

E4M3 = torch.float8_e4m3fn
NEW_TOKENS = {"decode": None, "extend": [4, 1, 5, 9]}
SCALES = [KvScales(0.5, 3.0), KvScales(2.5, 0.3)]  # by layer


def make_fixture(mode: str = "decode", stock: str = "intel_amx", **options: Any) -> Fixture:
    """On the CPU; `stock` is the name of the stock backend, whatever it is."""
    return Fixture(SHARED, LENGTHS, NEW_TOKENS[mode], stock_backend=stock, **{"kv_dtype": E4M3, **options})


def gpu_fixture(**options: Any) -> GpuFixture:
    """Over a stock backend that knows scales."""
    always = {"settings": Settings(metrics=False, route="packed"), "stock_backend": "flashinfer", "kv_dtype": E4M3}
    return GpuFixture(SHARED, LENGTHS, **always | options)


def give_scales(fixture: Fixture) -> Fixture:
    """As a checkpoint with scales leaves the layers: tensors on the device, and the numbers."""
    for layer, scales in zip(fixture.layers, SCALES, strict=True):
        layer.k_scale, layer.v_scale = (
            torch.nn.Parameter(torch.tensor(scale, device=fixture.tensors), requires_grad=False) for scale in scales
        )
        layer.k_scale_float, layer.v_scale_float = scales
    return fixture


def expected(fixture: Fixture, scales: list[KvScales]) -> list[torch.Tensor]:
    """Dense attention over what the pool holds, by layer."""
    return [fixture.dense(layer, k_scale=k, v_scale=v) for layer, (k, v) in zip(fixture.layers, scales, strict=True)]


def assert_same(packed: list[torch.Tensor], dense: list[torch.Tensor]) -> None:
    tolerance = 2e-2 if packed[0].dtype is DTYPE else 2e-5
    for ours, theirs in zip(packed, dense, strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs.double(), rtol=tolerance, atol=tolerance)


def stored(fixture: Fixture, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    slots = fixture.batch.out_cache_loc
    return fixture.pool.get_key_buffer(layer.layer_id)[slots], fixture.pool.get_value_buffer(layer.layer_id)[slots]


@pytest.mark.parametrize("mode", ["decode", "extend"])
class TestPackedSteps:
    def test_each_layer_has_scales_of_its_own(self, mode: str) -> None:
        fixture = give_scales(make_fixture(mode))
        assert_same(fixture.run(), expected(fixture, SCALES))
        assert fixture.fallbacks == {}

    def test_new_keys_and_values_are_divided_by_them_when_they_are_stored(self, mode: str) -> None:
        fixture = give_scales(make_fixture(mode))
        fixture.run()
        for layer, scales in zip(fixture.layers, SCALES, strict=True):
            _, k, v = fixture.qkv(layer)
            for cached, new, scale in zip(stored(fixture, layer), (k, v), scales, strict=True):
                assert torch.equal(cached.view(torch.uint8), (new / scale).to(E4M3).view(torch.uint8))

    def test_an_stock_backend_that_ignores_scales_is_followed(self, mode: str) -> None:
        """torch_native reads what we have stored, and we what it has: neither may scale alone."""
        fixture = give_scales(make_fixture(mode, stock="torch_native"))
        assert_same(fixture.run(), fixture.run_stock())
        assert fixture.fallbacks == {}
        for layer in fixture.layers:
            _, k, _ = fixture.qkv(layer)
            assert torch.equal(stored(fixture, layer)[0].view(torch.uint8), k.to(E4M3).view(torch.uint8))


def test_scales_that_a_weight_update_brings_count_from_the_next_step_on() -> None:
    fixture = give_scales(make_fixture())
    fixture.run()
    layer = fixture.layers[0]
    layer.k_scale.copy_(torch.tensor(0.25))
    layer.k_scale_float = 0.25
    assert_same(fixture.run(), expected(fixture, [KvScales(0.25, SCALES[0].v), SCALES[1]]))


def test_a_cache_of_sixteen_bits_is_not_scaled() -> None:
    """A checkpoint's scales are for 8 bits; the pool divides only what it converts."""
    fixture = give_scales(make_fixture(kv_dtype=torch.bfloat16))
    fixture.qkv = lambda layer, original=fixture.qkv: original(layer, torch.bfloat16)  # type: ignore[method-assign]
    assert_same(fixture.run(), expected(fixture, [KvScales(1.0, 1.0)] * 2))


class TestScalesOfALayer:
    @pytest.mark.parametrize(
        ("scale", "on_host", "found"),
        [
            (None, None, 1.0),
            (None, 3.0, 1.0),  # then the pool does not divide
            (torch.tensor(2.0), 2.0, 2.0),
            (torch.tensor(2.0, device="meta"), 2.0, 2.0),  # the tensor is not looked at: that would wait for the GPU
            (0.5, None, 0.5),  # of a file of scales
            (torch.tensor(2.0), None, None),
            (torch.tensor(-1.0), -1.0, None),  # not loaded
            (torch.ones(KV_HEADS), [1.0, 1.0], None),
            (torch.tensor(torch.inf), torch.inf, None),
        ],
    )
    def test_forms(self, scale: Any, on_host: Any, found: float | None) -> None:
        layer = SimpleNamespace(k_scale=scale, k_scale_float=on_host, v_scale=None, v_scale_float=None)
        assert kv_scales(layer) == (None if found is None else KvScales(found, 1.0))
        layer = SimpleNamespace(k_scale=None, k_scale_float=None, v_scale=scale, v_scale_float=on_host)
        assert kv_scales(layer) == (None if found is None else KvScales(1.0, found))

    def test_a_layer_whose_scales_the_host_does_not_know_stays_with_the_stock_backend(self) -> None:
        fixture = make_fixture()
        fixture.layers[1].k_scale = fixture.layers[1].v_scale = torch.tensor(2.0)
        fixture.run()
        assert fixture.fallbacks == {fallback_reasons.KV_SCALES: 1}
        assert fixture.stock.layer_calls == 1

    def test_so_does_a_layer_of_which_a_weight_update_takes_that_knowledge(self) -> None:
        fixture = give_scales(make_fixture())
        fixture.run()
        fixture.layers[1].k_scale_float = None
        fixture.run()
        assert fixture.fallbacks == {fallback_reasons.KV_SCALES: 1}
        assert fixture.stock.layer_calls == 1


def test_which_stock_backends_know_scales() -> None:
    assert all(knows_kv_scales(name) for name in ("flashinfer", "fa3", "fa4", "triton", "trtllm_mha", "intel_amx"))
    assert not knows_kv_scales("torch_native")
    assert not knows_kv_scales("flex_attention")


def test_e5m2() -> None:
    fixture = make_fixture(kv_dtype=torch.float8_e5m2)
    fixture.backend._layers.scan_model()
    assert fixture.backend._layers.unsupported_reasons() == {fallback_reasons.KV_DTYPE}


class TestOnAGpu:
    def test_eager_steps(self) -> None:
        fixture = give_scales(gpu_fixture())
        assert_same(fixture.run(), expected(fixture, SCALES))
        assert fixture.fallbacks == {}
        assert (fixture.device_step.dtype, fixture.device_step.kv_dtype) == (DTYPE, E4M3)
        assert fixture.device_step.shape.kv_bytes == 1

    def test_graphs_hold_each_layers_scales(self) -> None:
        fixture = give_scales(gpu_fixture(graphs=4, settings=Settings(metrics=False, route="packed")))
        fixture.graphs.capture(4)
        for layer in fixture.layers:  # what was captured stays, as it does in the stock backends
            layer.k_scale_float = layer.v_scale_float = 99.0
        assert_same(fixture.graphs.replay(), expected(fixture, SCALES))
        assert fixture.fallbacks == {}

    def test_queries_that_the_kernels_do_not_take(self) -> None:
        fixture = gpu_fixture(dtype=torch.float32)
        fixture.backend._layers.scan_model()
        assert fixture.backend._layers.unsupported_reasons() == {fallback_reasons.QUERY_DTYPE}

    def test_layers_over_different_caches_have_steps_of_their_own(self) -> None:
        fixture = gpu_fixture()
        layer, cache = fixture.layers[0], fixture.pool.get_key_buffer(0)
        assert fixture.executor.shape_index(layer, cache) == fixture.executor.shape_index(layer, cache) == 0
        assert fixture.executor.shape_index(layer, cache.to(DTYPE)) == 1

    def test_what_native_kernels_take_is_whole_words_of_sixteen_bytes(self) -> None:
        cache = torch.zeros(8, 2, 72, dtype=torch.uint8).view(E4M3)[:, :, :64]
        assert host_kernels().unsupported_reason(64, cache) == fallback_reasons.KV_LAYOUT
        assert host_kernels().unsupported_reason(64, cache.contiguous()) is None
        assert host_kernels().unsupported_reason(64, cache.contiguous().view(torch.uint8)) == fallback_reasons.KV_DTYPE
