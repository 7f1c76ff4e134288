"""Deployments around the backend: linear hybrids, data parallel attention, HiCache, disaggregated decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

from sgl_prefix_attn.sglang_plugin.dispatch.graph_variants import packing_backend
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import ObjectReader, reader_for
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.backend.test_backend import assert_same, decode, extend
from tests.sglang_plugin.fixture import Fixture
from tests.sglang_plugin.prefix.sharing import check
from tests.support.small_scheduler import TREES, SmallScheduler

FULL_LAYERS = [1, 3]  # the others are layers of linear attention, which our backend never sees


class LinearBackend:
    """SGLang's backend for linear attention, as far as its wrapper asks it."""

    needs_cpu_seq_lens = False

    def __init__(self) -> None:
        self.metadata_calls = 0

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.metadata_calls += 1


@pytest.mark.parametrize("make", [decode, extend])
class TestLinearHybrids:
    def wrapped(self, make: Any) -> tuple[Fixture, HybridLinearAttnBackend, LinearBackend]:
        fixture = make()
        plain = fixture.pool
        pool = HybridLinearKVPool(
            plain.size, plain.dtype, 1, plain.head_num, plain.head_dim, FULL_LAYERS, "cpu", None, full_kv_pool=plain
        )
        for layer, number in zip(fixture.layers, FULL_LAYERS, strict=True):
            layer.layer_id = number
        fixture.runner.token_to_kv_pool = pool
        fixture.stock = fixture.make_stock()
        fixture.backend = fixture.make_backend()
        linear = LinearBackend()
        return fixture, HybridLinearAttnBackend(fixture.backend, linear, FULL_LAYERS), linear

    def test_full_layers_run_packed_behind_sglangs_wrapper(self, make: Any) -> None:
        fixture, outer, linear = self.wrapped(make)
        with fixture.handover.handed_over(fixture.handed):
            outer.init_forward_metadata(fixture.batch)
            out = []
            for layer in fixture.layers:
                q, k, v = fixture.qkv(layer)
                out.append(outer.forward(q=q, k=k, v=v, layer=layer, forward_batch=fixture.batch))
        assert_same(out, fixture.run_stock())
        assert (linear.metadata_calls, fixture.stock.layer_calls) == (1, 0)
        assert fixture.fallbacks == {}
        assert sum(fixture.state.counters.steps_packed.values()) == 1

    def test_the_wrapper_shows_the_hooks_our_backend(self, make: Any) -> None:
        fixture, outer, _ = self.wrapped(make)
        assert packing_backend(SimpleNamespace(attn_backend=outer)) is fixture.backend
        assert outer.needs_cpu_seq_lens is fixture.backend.needs_cpu_seq_lens
        for name in ("req_to_token_pool", "token_to_kv_pool"):  # SGLang reads them from every backend
            assert getattr(fixture.backend, name) is getattr(fixture.runner, name)


def test_a_rank_that_data_parallel_attention_pads() -> None:
    """Without graphs, SGLang pads all ranks to the largest batch. Padding is no request: the step runs stock."""
    fixture = decode()
    fixture.run()
    assert fixture.fallbacks == {}
    padded, requests = fixture.batch, fixture.batch.batch_size
    padded.positions = padded.seq_lens - 1
    padded.batch_size = requests + 2
    names = ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value")  # the second up to 0.5.17
    fixture.runner.attn_backend = SimpleNamespace(**dict.fromkeys(names, lambda: 1))
    padded._pad_inputs_to_size(fixture.runner, requests + 2, requests + 2)
    assert_same(fixture.run(), fixture.run_stock())
    assert fixture.fallbacks == {reasons.ROW_MISMATCH: 1}


@pytest.mark.skipif("objects" not in TREES, reason="nodes of SGLang 0.5.23 are ids")
class TestHierarchicalCache:
    def test_a_node_that_is_only_in_host_memory_is_on_no_running_path(self) -> None:
        """HiCache leaves an evicted node in the tree, without device slots. Requests hold its parent until a load."""
        scheduler = SmallScheduler("objects")
        long, short = scheduler.request([1] * 20), scheduler.request([1] * 10 + [2] * 5)
        for request in (long, short):
            scheduler.match(request)
            scheduler.prefill_done(request)
        reader = reader_for(scheduler.tree)
        assert isinstance(reader, ObjectReader)
        node = long.last_node
        scheduler.finish(long)
        value, node.value = node.value, None  # as HiRadixCache's eviction to the host
        (path,) = reader.paths([short.last_node])
        assert path is not None
        assert [(step.begin, step.end) for step in path] == [(0, 10), (10, 15)]
        assert node.id not in [step.id for step in path]
        node.value = value  # loaded back: another request may hold it, under the same id
        (path,) = reader.paths([node])
        assert path is not None
        assert [(step.begin, step.end) for step in path] == [(0, 10), (10, 20)]
        assert path[-1].id == node.id


@pytest.mark.parametrize("kind", TREES)
def test_disaggregated_decode_shares_what_its_queue_has_locked(kind: str) -> None:
    """With its radix option: requests match and lock before their KV arrives, and their first step here is a decode."""
    scheduler, tracker = SmallScheduler(kind), BatchTracker()
    queue: Any = SimpleNamespace(
        tree_cache=scheduler.tree,
        _build_decode_prefix_match=lambda request, result, **limits: (
            result.device_prefix_len if hasattr(result, "device_prefix_len") else len(result.device_indices)
        ),
        _uses_swa_tail_prealloc=lambda: False,  # SGLang 0.5.23 asks
    )
    for number, begin in enumerate((0, 50, 50)):
        request = scheduler.request([1] * 50 + [2 + number] * 3)
        assert DecodePreallocQueue._match_prefix_and_lock(queue, request) == begin
        scheduler.receive(request)
        if number == 0:
            scheduler.finish(request)  # its prompt stays in the tree
        else:
            scheduler.running.append(request)
    for _ in range(2):
        scheduler.decode()
        assert check(scheduler, tracker, scheduler.decode_batch()).forest.paths() == [[(0, 0, 50)], [(0, 0, 50)]]
