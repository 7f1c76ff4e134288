"""trtllm_mha wrapped: SGLang's own class beside packed layers, over emulated kernels. No GPU ran it wrapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import trtllm_mha_backend as stock_module
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend, TRTLLMMHAMetadata
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import eligibility
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import graphs_share_metadata
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.execution.layer_support import FP8
from sgl_prefix_attn.sglang_plugin.startup import factory
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.execution.test_fp8_kv import give_scales, stored
from tests.sglang_plugin.fixture import active_state
from tests.sglang_plugin.gpu_fixture import DTYPE, GpuFixture, host_kernels

STORE = "sglang.kernels.ops.kvcache.fused_fp8_qkv_kv_cache"
store_module = pytest.importorskip(STORE, reason="SGLang 0.5.16 stores fp8 KV without it")

PAGE = 16
PATHS = [[(1, 0, 2000), (2, 2000, 2608)], [(1, 0, 2000), (2, 2000, 2608)], [(1, 0, 2000)], []]
LENGTHS = [2640, 2615, 2005, 9]
WRAP = Settings(wrap=True, metrics=False, route="packed")  # type: ignore[arg-type]


def decode_kernel(query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, **options: Any) -> torch.Tensor:
    """FlashInfer's decode over pages of [page, kv heads, tokens, head dim], in fp32."""
    outs = []
    for q, table, length in zip(query.float(), block_tables, seq_lens.tolist(), strict=True):
        k, v = (cache[table].float().transpose(1, 2).flatten(0, 1)[:length] for cache in kv_cache)
        k, v = (part.repeat_interleave(len(q) // part.shape[1], 1) for part in (k, v))
        weights = (torch.einsum("hd,thd->ht", q, k) * options["bmm1_scale"]).softmax(-1)
        outs.append(torch.einsum("ht,thd->hd", weights, v) * options["bmm2_scale"])
    return torch.stack(outs).to(options["out_dtype"])


def store_kernel(
    q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, cache_loc: Any, k_scale: Any, v_scale: Any
) -> torch.Tensor | None:
    """SGLang's kernel that stores fp8 KV, by its source."""
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        cache.view(torch.uint8)[cache_loc] = (new.float() / (1 if scale is None else scale)).to(FP8).view(torch.uint8)
    return None if q is None else q.to(FP8)


class Paged(GpuFixture):
    """A fixture over SGLang's class; `xqa`: as on Hopper, where queries stay in 16 bits."""

    def __init__(self, *, xqa: bool = True, **options: Any) -> None:
        self._xqa = xqa
        settings = Settings(metrics=False, route="packed")
        super().__init__(PATHS, LENGTHS, page=PAGE, stock_backend=trtllm_mha.NAME, settings=settings, **options)

    def make_stock(self) -> Any:
        stock = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
        vars(stock).update(
            page_size=PAGE, data_type=self.pool.dtype, q_data_type=DTYPE, is_xqa_impl=self._xqa, is_nvfp4_kvcache=False,
            token_to_kv_pool=self.pool, max_context_len=4096, workspace_buffer=None, decode_seq_len_splits=1,
            _swa_kv_pool=None, _multi_ctas_kv_counter_buffer=None, _default_kv_scale=torch.ones(1),
            kv_cache_quant_method=SimpleNamespace(needs_global_scale=lambda: False), needs_cpu_seq_lens=True,
            decode_uses_native_fp4=False,
        )  # fmt: skip
        return stock

    def run_stock(self) -> list[torch.Tensor]:
        table = self.rows.req_to_token[self.batch.req_pool_indices, ::PAGE] // PAGE
        self.stock.forward_metadata = TRTLLMMHAMetadata(
            cache_seqlens_int32=self.batch.seq_lens.to(torch.int32), page_table=table
        )
        return [self.stock.forward_decode(*self.qkv(layer), layer, self.batch) for layer in self.layers]


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Emulated kernels; the slots that the one for stores got."""
    found: list[Any] = []

    def store(**arguments: Any) -> Any:
        found.append(arguments["cache_loc"])
        return store_kernel(**arguments)

    kernels = SimpleNamespace(decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode_kernel))
    monkeypatch.setattr(stock_module, "flashinfer", kernels, raising=False)
    monkeypatch.setattr(store_module, "fused_fp8_qkv_kv_cache", store)
    monkeypatch.setattr(eligibility, "choose_kernels", lambda setting, device: host_kernels())
    return found


@pytest.mark.parametrize(
    ("kv_dtype", "scaled", "xqa", "tolerance"),
    [(DTYPE, False, False, 2e-2), (FP8, False, True, 2e-2), (FP8, True, True, 2e-2), (FP8, True, False, 0.3)],
)
def test_both_read_and_store_the_same(stores, kv_dtype, scaled, xqa, tolerance):
    """Data-center Blackwell rounds queries to 8 bits as well; packed layers do not."""
    fixture = Paged(kv_dtype=kv_dtype, xqa=xqa)
    if scaled:
        give_scales(fixture)
    packed = fixture.run()
    assert fixture.fallbacks == {}
    assert fixture.state.counters.steps_packed["decode"] == 1
    ours = [stored(fixture, layer) for layer in fixture.layers]
    assert len(stores) == (len(ours) if kv_dtype is FP8 else 0)
    for buffer in (*fixture.pool.k_buffer, *fixture.pool.v_buffer):
        buffer[fixture.batch.out_cache_loc] = 0
    for found, expected in zip(packed, fixture.run_stock(), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for mine, layer in zip(ours, fixture.layers, strict=True):
        for found, expected in zip(mine, stored(fixture, layer), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def _strided(fixture: Paged) -> None:
    buffers = fixture.pool.k_buffer
    buffers[1] = torch.cat([buffers[1], buffers[1]], dim=2)[:, :, : buffers[1].shape[2]]


def _stock(**values: Any) -> Any:
    return lambda fixture: vars(fixture.stock).update(values)


def _layers(**values: Any) -> Any:
    return lambda fixture: [vars(layer).update(values) for layer in fixture.layers]


def _muse(fixture: Paged) -> None:
    config = SimpleNamespace(architectures=["MuseSparkForConditionalGeneration"])
    fixture.runner.model_config = SimpleNamespace(is_encoder_decoder=False, hf_config=config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda fixture: None, None),
        (_stock(page_size=512), reasons.KV_LAYOUT),  # does not divide the pool
        (_stock(page_size=0), reasons.KV_LAYOUT),
        (_strided, reasons.KV_LAYOUT),
        (lambda fixture: setattr(fixture.pool, "use_hnd", True), reasons.KV_LAYOUT),
        (_stock(data_type=DTYPE), reasons.KV_DTYPE),
        (_layers(k_scale=torch.tensor(2.0)), reasons.KV_SCALES),  # SGLang divides, and does not multiply
        (_layers(k_scale_float=2.0), reasons.KV_SCALES),  # SGLang multiplies, and does not divide
        (_stock(_fused_fp8_qkv_kv_cache=None), reasons.KV_SCALES),  # as before 0.5.16
        (_muse, reasons.READS_METADATA),
        (lambda fixture: setattr(fixture.runner, "model", None), reasons.KV_LAYOUT),  # shows no layer to check
    ],
)
def test_what_is_wrapped_and_what_is_refused(stores, change, reason):
    fixture = Paged(kv_dtype=FP8)
    fixture.runner.device = "cuda"
    change(fixture)
    assert eligibility.wrap_refusal(fixture.facts, trtllm_mha.NAME, fixture.stock, WRAP) == reason


def test_a_wrapped_one_packs_and_the_log_says_that_it_was_never_run(stores, asked, caplog):
    fixture = Paged(kv_dtype=FP8)
    fixture.runner.device = "cuda"
    fixture.backend = factory.wrap_backend(fixture.runner, trtllm_mha.NAME, fixture.stock, WRAP)
    fixture.state = active_state()
    assert isinstance(fixture.backend, TRTLLMHAAttnBackend)
    assert fixture.backend is not fixture.stock
    fixture.run()
    assert (fixture.state.counters.steps_packed["decode"], len(stores)) == (1, len(fixture.layers))
    assert caplog.text.count(trtllm_mha.TESTED) == 1


def test_a_second_graph_of_a_size_would_take_the_metadata_of_the_first() -> None:
    """So no size has graphs of both kinds that hold stock layers: a replay of one would write to freed memory."""
    stock = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
    vars(stock).update(
        max_num_pages=4, device="cpu", _swa_kv_pool=None, use_sliding_window_kv_pool=False,
        speculative_num_draft_tokens=None,
    )  # fmt: skip
    stock.init_cuda_graph_state(2, 2)
    made = [stock._build_cuda_graph_metadata(2, 2, ForwardMode.DECODE, None, torch.device("cpu")) for _ in range(2)]
    assert made[0].cu_seqlens_k is not made[1].cu_seqlens_k
    assert stock.decode_cuda_graph_metadata[2] is made[1]
    assert not graphs_share_metadata(trtllm_mha.NAME)
