"""The CUDA executor and SGLang's decode graphs without a GPU: device buffers that compute with the CPU kernels."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.core.attention import packed_attention
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import ModelShape, Plan
from sgl_prefix_attn.core.step_buffers import PlanTooLarge, StepLimits
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch import graph_variants
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.execution.kernel_set import Kernels, native_kernels
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from tests.sglang_plugin.fixture import CountingStock, Fixture

GPU_HEAD_DIM = 64
DTYPE = torch.bfloat16
# SGLang 0.5.23 and later.
_ASKS_FOR_TOKENS_OF_RANKS = "global_num_tokens_cpu" in inspect.signature(build_replay_fb_view).parameters


# Long enough that reading the prefix once pays on a GPU.
SHARED = [[(1, 0, 2000), (2, 2000, 2600)], [(1, 0, 2000), (2, 2000, 2600)], [(1, 0, 2000)], []]
LENGTHS = [2640, 2605, 2005, 9]


class HostStep:
    """What `CudaStep` promises, in host memory: a plan stays until the next, prepared tables are copies."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, device: torch.device, limits: StepLimits,
        kv_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.device, self.limits = shape, dtype, device, limits
        self.kv_dtype = kv_dtype or dtype
        self.loads: list[Plan] = []
        self.prepared = 0
        self.attended = 0
        self.recording: list[Callable[[], Any]] | None = None
        self.lost = False  # whether a release of memory has taken its content
        self._plan: Plan | None = None

    def load(self, plan: Plan, seq_lens: Int64Array, growth: int) -> None:
        ends = np.where(plan.items[:, 4] < 0, seq_lens[plan.items[:, 2]] + growth, plan.items[:, 4])
        needed = {
            "queries": plan.num_queries,
            "items": len(plan.items),
            "kv_slots": int((ends - plan.items[:, 3]).sum()),
            "partials": plan.num_partials,
        }
        for name, count in needed.items():
            if count > getattr(self.limits, name):
                raise PlanTooLarge(f"the plan needs {count} {name}; the buffers hold {getattr(self.limits, name)}")
        self.loads.append(plan)
        self._plan, self._most = plan, seq_lens + growth

    def reset(self) -> None:
        self._plan, self.lost = None, False

    def prepare(
        self, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
        visible: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert not self.lost
        self._visible = visible
        assert req_pool_indices.dtype == seq_lens.dtype == torch.int64
        assert min(len(req_pool_indices), len(seq_lens)) >= self._plan.num_requests
        assert visible is None or (len(visible) >= self._plan.num_queries and visible.is_contiguous())
        count = self._plan.num_requests
        self._rows, self._lens = req_to_token[req_pool_indices[:count]].clone(), seq_lens[:count].clone()
        assert (self._lens.numpy() <= self._most).all(), "a tail outgrew the room that its plan was loaded with"
        self.prepared += 1

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, **options: Any
    ) -> None:
        assert (q.dtype, k_cache.dtype, out.dtype) == (self.dtype, self.kv_dtype, self.dtype)

        def launch() -> None:
            self.attended += 1
            packed_attention(
                q, k_cache, v_cache, self._plan, req_to_token=self._rows,
                req_pool_indices=torch.arange(len(self._lens)), seq_lens=self._lens,
                visible=visible_rows(self._visible, len(q)), out=out, **options,
            )  # fmt: skip

        if self.recording is not None:
            self.recording.append(launch)
        else:
            launch()


def visible_rows(visible: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """Masks of a batch, with more behind them for the rows that a graph pads."""
    if visible is None:
        return None
    return torch.cat([visible, visible.new_full((tokens - len(visible),), -1)])


def host_kernels(make_step: Callable[..., Any] = HostStep) -> Kernels:
    """The native kernels' conditions, computed by `HostStep`."""
    return dataclasses.replace(native_kernels(), make_step=make_step)


class GraphStock(CountingStock):
    """The stock backend of a GPU: counts what its graph side is asked, in order."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.graph_calls: list[str] = []
        self.recording: list[Callable[[], Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.recording is None:
            return super().forward(*args, **kwargs)
        out = torch.empty_like(args[0] if args else kwargs["q"])
        self.recording.append(lambda: out.copy_(super(GraphStock, self).forward(*args, **kwargs)))
        return out

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graph_calls.append(f"state {max_bs}")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.graph_calls.append("capture" if in_capture else "replay")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.graph_calls.append("in graph")

    def on_after_cuda_graph_warmup(self) -> None:
        self.graph_calls.append("warm")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


class GpuFixture(Fixture):
    """A fixture whose backend has a CUDA executor, with decode graphs as SGLang runs them.

    Args:
        graphs: size of the largest graph; 0: none.
        options: see `Fixture`. Over `torch_native`, the default, every decode step runs packed.
        kernels: real ones, for tensors on a GPU; None: everything is on the host.
    """

    def __init__(
        self,
        *args: Any,
        settings: Settings | None = None,
        graphs: int = 0,
        kernels: Kernels | None = None,
        **options: Any,
    ) -> None:
        self._settings = settings or Settings(metrics=False)
        self._kernels = kernels or host_kernels(self._make_step)
        self.steps: list[HostStep] = []
        arguments = SimpleNamespace(
            chunked_prefill_size=64, disable_radix_cache=False, enable_two_batch_overlap=False, enable_pdmux=False
        )
        of_gpu = {"kv_dtype": DTYPE, "dtype": DTYPE, "head_dim": GPU_HEAD_DIM, "room": 64, "server_args": arguments}
        of_gpu |= {"tensors": "cpu" if kernels is None else "cuda", "spec_algorithm": SpeculativeAlgorithm.NONE}
        of_gpu |= {"stock_backend": "torch_native"}
        super().__init__(*args, settings=self._settings, **of_gpu | options)
        if graphs:
            self.graphs = DecodeGraphs(self, graphs)

    def make_stock(self) -> Any:
        return GraphStock(self.runner)

    def make_executor(self) -> Any:
        self.executor = CudaExecutor(self.facts, self._settings, self._kernels, self.state.stock_backend)
        return self.executor

    def _make_step(self, *args: Any) -> HostStep:
        self.steps.append(HostStep(*args))
        return self.steps[-1]

    @property
    def device_step(self) -> HostStep:
        return self.steps[-1]

    def qkv(self, layer: Any, dtype: torch.dtype = DTYPE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().qkv(layer, dtype)


class DecodeGraphs:
    """SGLang's decode graph runner in small: static inputs, padded batches, two warm-ups, capture, replay.

    Graphs lie under the keys that our hooks make of SGLang's; `hooked` False: without the hooks. Where the fixture's
    batch is a verify step, so are the graphs.
    """

    def __init__(self, fixture: GpuFixture, max_batch: int, *, hooked: bool = True) -> None:
        self.fixture, self.max_batch, self.hooked = fixture, max_batch, hooked
        self.attn_backend = fixture.backend
        self.spec_info = fixture.batch.spec_info
        self.width = 1 if self.spec_info is None else self.spec_info.draft_token_num
        self.capture_forward_mode = ForwardMode.DECODE if self.spec_info is None else ForwardMode.TARGET_VERIFY
        tokens = max_batch * self.width
        with torch.device(fixture.tensors):
            self.buffers = SimpleNamespace(
                input_ids=torch.zeros(tokens, dtype=torch.int64),
                positions=torch.zeros(tokens, dtype=torch.int64),
                req_pool_indices=torch.zeros(max_batch, dtype=torch.int64),
                seq_lens=torch.ones(max_batch, dtype=torch.int64),
                seq_lens_cpu=torch.ones(max_batch, dtype=torch.int64, device="cpu"),
                out_cache_loc=torch.zeros(tokens, dtype=torch.int64),
                mamba_track_indices=None,
            )
        layer = fixture.layers[0]
        width = layer.tp_q_head_num * layer.qk_head_dim
        self.q = torch.zeros(len(fixture.layers), tokens, width, dtype=DTYPE, device=fixture.tensors)
        self.graphs: dict[ShapeKey, tuple[list[Callable[[], Any]], list[torch.Tensor]]] = {}
        fixture.backend.init_cuda_graph_state(max_batch, tokens)

    def graph(self, size: int) -> tuple[list[Callable[[], Any]], list[torch.Tensor]]:
        """The packed graph of a size: launches and outputs."""
        return self.graphs[ShapeKey(size)]

    def stock_graph(self, size: int) -> tuple[list[Callable[[], Any]], list[torch.Tensor]]:
        """The stock backend's."""
        return self.graphs[ShapeKey(size, variant_label=graph_variants.LABEL)]

    def capture(self, size: int, **kwargs: Any) -> None:
        """As SGLang captures a shape, under our hook."""
        graph_variants.around_capture_one_shape(DecodeGraphs._capture_one_shape, self, size, **kwargs)

    def _key(self, size: int) -> ShapeKey:
        if not self.hooked:
            return ShapeKey(size)
        return graph_variants.around_make_graph_key(lambda runner, size: ShapeKey(size), self, size)

    def _capture_one_shape(self, size: int, **kwargs: Any) -> None:
        fixture, buffers = self.fixture, self.buffers
        tokens = size * self.width
        batch = ForwardBatch(
            forward_mode=self.capture_forward_mode, batch_size=size, input_ids=buffers.input_ids[:tokens],
            req_pool_indices=buffers.req_pool_indices[:size], seq_lens=buffers.seq_lens[:size],
            seq_lens_cpu=buffers.seq_lens_cpu[:size], out_cache_loc=buffers.out_cache_loc[:tokens],
            seq_lens_sum=size, spec_info=self.spec_info,
        )  # fmt: skip
        backend = fixture.backend
        backend.init_forward_metadata_out_graph(batch, in_capture=True)

        outputs = [torch.full_like(rows[:tokens], torch.nan) for rows in self.q]
        recorded: list[Callable[[], Any]] | None = None

        def run_once() -> None:
            backend.init_forward_metadata_in_graph(batch)
            for i, layer in enumerate(fixture.layers):
                out = backend.forward(self.q[i, :tokens], None, None, layer, batch, save_kv_cache=False, **kwargs)
                # Whatever comes after attention in the model consumes its output before the next layer's.
                consume = functools.partial(outputs[i].copy_, out)
                if recorded is None:
                    consume()
                else:
                    recorded.append(consume)

        for _ in range(2):
            run_once()
            backend.on_after_cuda_graph_warmup()
        if fixture.tensors == "cuda":
            graph = torch.cuda.CUDAGraph()
            # As SGLang does: a graph of another test that is collected meanwhile would break this capture.
            gc.collect()
            gc.freeze()
            with torch.cuda.graph(graph):
                run_once()
            gc.unfreeze()
            self.graphs[self._key(size)] = [graph.replay], outputs
            return
        recorded = []
        for part in (fixture.stock, *fixture.steps):
            part.recording = recorded
        run_once()
        for part in (fixture.stock, *fixture.steps):
            part.recording = None
        self.graphs[self._key(size)] = recorded, outputs

    def replay(self, handed: Handed | None = None, batch: Any = None, size: int | None = None) -> list[torch.Tensor]:
        """Runs the fixture's batch through a graph of `size` requests; returns each layer's rows of the batch."""
        fixture, buffers = self.fixture, self.buffers
        batch = fixture.batch if batch is None else batch
        raw = batch.batch_size
        size = size or min(key.size for key in self.graphs if key.size >= raw)
        rows = raw * self.width
        for name, filler in (("req_pool_indices", 0), ("seq_lens", 1), ("seq_lens_cpu", 1), ("out_cache_loc", 0)):
            buffer = getattr(buffers, name)
            source = getattr(batch, name)
            count = raw if source is None else len(source)
            buffer[count : size * self.width] = filler
            if source is not None:
                buffer[:count] = source
        for i, layer in enumerate(fixture.layers):
            q, k, v = fixture.qkv(layer)
            self.q[i, :rows] = q[:rows]
            if rows:  # SGLang's kernel for it cannot be launched with no rows at all
                loc = KVWriteLoc(batch.out_cache_loc, batch.out_cache_loc)
                fixture.pool.set_kv_buffer(layer, loc, k[:rows], v[:rows])
        mode = self.capture_forward_mode
        more = {"global_num_tokens_cpu": None} if _ASKS_FOR_TOKENS_OF_RANKS else {}
        view = build_replay_fb_view(
            batch, buffers, size, raw, size * self.width, seq_len_fill_value=1, capture_forward_mode=mode,
            is_encoder_decoder=False, **more,
        )  # fmt: skip
        with fixture.handover.handed_over(fixture.handed if handed is None else handed):
            fixture.backend.init_forward_metadata_out_graph(view)
        table = fixture.rows.req_to_token.clone()
        if fixture.backend.decision.step is not None and not fixture.backend._layers.has_stock_layers:
            # From here on the scheduler may change its tables: packed layers read copies, and torch_native does not.
            fixture.rows.req_to_token.fill_(0)
        recorded, outputs = self.graphs[self._key(size)]
        for launch in recorded:
            launch()
        fixture.rows.req_to_token.copy_(table)
        return [output[:rows].clone() for output in outputs]


def decode(**options: Any) -> GpuFixture:
    """A decode batch of four requests, two of which share two levels."""
    return GpuFixture(SHARED, LENGTHS, **options)


def extend(**options: Any) -> GpuFixture:
    """The same requests in an extend step."""
    return GpuFixture(SHARED, LENGTHS, [4, 1, 5, 9], **options)


def graphs(*sizes: int, **options: Any) -> GpuFixture:
    """The decode batch with captured graphs of some sizes."""
    fixture = decode(graphs=max(sizes), **options)
    for size in sorted(sizes, reverse=True):
        fixture.graphs.capture(size)
    return fixture


def first_of(batch: Any, count: int) -> Any:
    """The first requests of a batch as a batch; none: that of an idle rank."""
    part = SimpleNamespace(**vars(batch))
    part.batch_size, part.forward_mode = count, batch.forward_mode if count else ForwardMode.IDLE
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
        setattr(part, name, getattr(batch, name)[:count])
    return part


def out_of_memory(fixture: GpuFixture) -> None:
    """From now on, no device buffers can be allocated."""

    def make_step(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fixture.executor._kernels = host_kernels(make_step)


def assert_same(packed: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    """Shapes are equal, numbers are as near as 16-bit types allow."""
    for ours, theirs in zip(packed, stock, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
