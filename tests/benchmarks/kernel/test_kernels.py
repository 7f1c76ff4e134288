"""The adapters of GPU kernels on the CPU: fake modules compute what they are told, and all have to agree."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from benchmarks.kernel import fixture, packed, stock, timing
from benchmarks.workloads import draw
from sgl_prefix_attn.core.gpu import H200
from tests.sglang_plugin.gpu_fixture import HostStep
from tests.support.reference import reference_attention

CPU = torch.device("cpu")


def attend(q: Any, k: Any, v: Any, slots: Sequence[torch.Tensor], scale: float, out: torch.Tensor) -> torch.Tensor:
    """Attention of each query over its KV slots."""
    assert len(slots) == len(q) == len(out)
    for row, used in enumerate(slots):
        keys, values = (fixture.rows(cache, used.long()).movedim(0, 1) for cache in (k, v))
        query = q[row].float()[:, None]
        found = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)
        out[row] = found[:, 0].to(out.dtype)
    return out


def ragged(indptr: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    assert indptr.dtype == indices.dtype == torch.int32
    return [indices[begin:end] for begin, end in itertools.pairwise(indptr.tolist())]


class Wrapper:
    """FlashInfer's. Index pointers on a device would cost a copy back."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, indptr: Any, indices: Any, last: Any, *numbers: int, q_data_type: Any, kv_data_type: Any) -> None:
        assert indptr.device.type == last.device.type == "cpu"
        assert last.tolist() == [1] * (len(indptr) - 1)
        self.slots, self.numbers, self.types = ragged(indptr, indices), numbers, (q_data_type, kv_data_type)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        _, page_size, kv_heads, head_dim = kv[0].shape
        assert (q.shape[1], kv_heads, head_dim, page_size) == self.numbers
        assert (q.dtype, kv[0].dtype) == self.types
        return attend(q, kv[0].flatten(0, 1), kv[1].flatten(0, 1), self.slots, head_dim**-0.5, out)


def flash_attention(*, q: Any, k_cache: Any, v_cache: Any, page_table: Any, out: Any, **call: Any) -> tuple[Any, ...]:
    """sgl-kernel's FlashAttention 3."""
    size, metadata = k_cache.shape[1], call["scheduler_metadata"]
    assert call["cu_seqlens_q"].tolist() == list(range(len(q) + 1))
    if metadata is not None:
        shape = tuple(metadata[name] for name in ("batch_size", "num_heads", "num_heads_k", "headdim", "page_size"))
        assert shape == (len(q), q.shape[1], k_cache.shape[2], q.shape[2], size)
    slots = [
        (pages[:, None] * size + torch.arange(size)).flatten()[:length]
        for pages, length in zip(page_table, call["cache_seqlens"].tolist(), strict=True)
    ]
    return attend(q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), slots, call["softmax_scale"], out), None


class CountSplits:
    """SGLang's Triton kernel, which is launched on a grid."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda splits, lens, requests, *rest, **more: splits.fill_(1)


def split_decode(q: Any, k: Any, v: Any, out: Any, indptr: Any, indices: Any, partials: Any, *rest: Any) -> None:
    lse, splits, most, scale, *_ = rest
    assert partials.shape == (*q.shape[:2], most, q.shape[2])
    assert (lse.shape, splits.tolist()) == (partials.shape[:3], [1] * len(q))
    assert indices.dtype == torch.int64  # offsets of 32 bits overflow in large pools
    attend(q, k, v, ragged(indptr, indices.int()), scale, out)


class Graph:
    """A CUDA graph, and with `Event` the clock of its device: an event takes 1 ms, a launch of `Graph.launch` 2 ms."""

    now = 0.0

    @staticmethod
    def launch() -> None:
        Graph.now += 2.0

    def capture_begin(self, capture_error_mode: str) -> None:
        self.begin = Graph.now

    def capture_end(self) -> None:
        self.ms, Graph.now = Graph.now - self.begin, self.begin

    def replay(self) -> None:
        Graph.now += self.ms


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Graph.now
        Graph.now += 1.0

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Stand-ins for the device, for our kernels, and for the packages of the others."""
    ours = {"Stream": lambda device: None, "stream": contextlib.nullcontext, "CUDAGraph": Graph, "Event": Event}
    properties = SimpleNamespace(multi_processor_count=132)
    for name, value in (
        ours | {"synchronize": lambda device: None, "get_device_properties": lambda _: properties}
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(stock, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(stock, "_workspaces", {})
    monkeypatch.setattr(packed, "gpu_of", lambda device: H200)
    monkeypatch.setattr(packed, "code_capability", lambda device: 90)
    monkeypatch.setattr(packed.PrefixPack, "step_class", HostStep)
    fa3 = SimpleNamespace(get_scheduler_metadata=lambda **call: call, flash_attn_with_kvcache=flash_attention)
    kernels = "sglang.kernels.ops.attention"
    for name, module in {
        "flashinfer": SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper),
        "sgl_kernel": SimpleNamespace(flash_attn=fa3),
        "sgl_kernel.flash_attn": fa3,
        "triton": SimpleNamespace(next_power_of_2=lambda count: 1 << (count - 1).bit_length()),
        f"{kernels}.decode_attention": SimpleNamespace(decode_attention_fwd=split_decode),
        f"{kernels}.metadata": SimpleNamespace(get_num_kv_splits_triton=CountSplits()),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return monkeypatch


@pytest.mark.parametrize("kv_dtype", fixture.KV_DTYPES)
@pytest.mark.parametrize("family", ["rollouts", "ragged"])
def test_all_kernels_compute_the_same_batch(family: str, kv_dtype: str) -> None:
    kv_type = fixture.KV_DTYPES[kv_dtype]
    ours = packed.PrefixPack(CPU)
    others = [stock.Decode(CPU, True), stock.Decode(CPU, False), stock.TritonDecode(CPU), stock.Fa3(CPU)]
    case = draw(3, family, (8, 2), 64, most_unique_bytes=1e6)
    tensors = fixture.Fixture(case, fixture.KvPool(case.unique_tokens * 2 * 64, CPU, kv_type), CPU)
    (expected,) = results(ours, tensors)
    facts = ours.facts()
    assert sum(facts["tile_rows"].values()) == facts["items"] > 0
    assert case.unique_tokens // 2 < facts["kv_tokens_packed"] <= sum(case.seq_lens)
    for other in others:
        if kv_type in other.kv_dtypes:
            for result in results(other, tensors):
                assert fixture.relative_error(result, expected) < 0.02, other.name


def results(kernel: Any, tensors: fixture.Fixture) -> list[torch.Tensor]:
    """What a kernel computes, by each of its options."""
    found = []
    for option in kernel.bind(tensors):
        kernel.use(option)
        kernel.plan()
        tensors.out.fill_(torch.nan)
        found.append(kernel.run().clone())
    kernel.release()
    return found


@pytest.mark.parametrize("kv_dtype", fixture.KV_DTYPES.values())
def test_dense_attention_of_a_batch_is_the_reference(kv_dtype: torch.dtype) -> None:
    case = draw(3, "ragged", (8, 2), 64, most_unique_bytes=1e5)
    tensors = fixture.Fixture(case, fixture.KvPool(case.unique_tokens * 2 * 64, CPU, kv_dtype), CPU)
    expected, _ = reference_attention(
        tensors.q, tensors.k, tensors.v, req_to_token=tensors.table, req_pool_indices=tensors.rows,
        seq_lens=tensors.lens64, query_lens=torch.ones_like(tensors.lens64), scale=tensors.scale,
    )  # fmt: skip
    found = torch.stack([tensors.dense(request, block=7) for request in range(len(case.paths))])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_times_are_those_of_the_devices_clock(gpu: pytest.MonkeyPatch) -> None:
    timer = timing.Timer(CPU, flush_bytes=64, effort=timing.Effort(launches=3))
    times = timer.measure(lambda: None, Graph.launch)
    assert (times.cold_us, times.warm_us, times.replays) == (3000.0, 2250.0, 20), "events, and one or four launches"
    assert (times.cold_spread, times.as_dict()["cold_us"]) == (0.0, 3000.0)
    assert (timer.quick(Graph.launch), timer.graph_floor_us()) == (3000.0, 1000.0)
    assert timing.copy_bandwidth(CPU, 1 << 10) == pytest.approx(2 * 1024 / 1e-3)
    gpu.setattr(torch.cuda, "synchronize", lambda device: (_ for _ in ()).throw(RuntimeError("illegal access")))
    assert timer.device_is_lost()
