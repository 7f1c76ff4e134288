"""A runner with SGLang's real pools, attention layers and torch_native backend, small enough for unit tests."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.eligibility import make_executor
from sgl_prefix_attn.sglang_plugin.backend.stock_only import StockOnly
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed, Handover
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason
from tests.support.reference import reference_attention

Q_HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 32, 2
# Paths and lengths of four requests, of which two share two levels.
SHARED = [[(1, 0, 200), (2, 200, 260)], [(1, 0, 200), (2, 200, 260)], [(1, 0, 200)], []]
LENGTHS = [300, 265, 205, 9]


def active_state() -> plugin_state.PluginState:
    """The state of this process, in which a backend was built."""
    return plugin_state.active()


class CountingStock(TorchNativeAttnBackend):
    """torch_native that counts what it is asked."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.metadata_calls = 0
        self.layer_calls = 0

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.metadata_calls += 1
        super().init_forward_metadata(forward_batch)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.layer_calls += 1
        return super().forward(*args, **kwargs)


def hides_trees(variable: str) -> bool:
    """Whether this SGLang has a prefix cache that shows no nodes, and selects it by this environment variable."""
    from sglang.srt.environ import envs

    if variable not in (versions.CPP_TREE_VARIABLE, versions.TREE_CORE_VARIABLE) or not hasattr(envs, variable):
        return False
    if variable == versions.CPP_TREE_VARIABLE:
        return True
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface

    return not hasattr(UnifiedTreeCoreInterface, "collect_path_info")


def hybrid_pool(size: int, dtype: torch.dtype, head_dim: int, device: str, windows: tuple[int, ...]) -> SWAKVPool:
    """A pool whose window layers have slots of their own, under the same numbers: torch_native does not map them."""
    pool = SWAKVPool(
        size, size, 1, dtype, KV_HEADS, head_dim, list(windows), [i for i in range(LAYERS) if i not in windows], device,
        enable_alt_stream=False,
    )  # fmt: skip
    pool.register_mapping(torch.arange(size + 2, device=device))
    return pool


def tree_masks(mask: torch.Tensor, seq_lens: list[int], *, of_gpu: bool) -> torch.Tensor:
    """SGLang's mask of a batch whose requests all have the same tree.

    Args:
        mask: [drafts, drafts] bool, which drafts a draft sees.
        seq_lens: KV lengths, drafts included.
        of_gpu: whether rows also have the columns of the committed KV, in a buffer with room for more.
    """
    if not of_gpu:
        return mask.repeat(len(seq_lens), 1).flatten()
    drafts = len(mask)
    rows = [torch.cat([mask.new_ones(drafts, length - drafts), mask], dim=1).flatten() for length in seq_lens]
    return torch.cat([*rows, mask.new_zeros(1000)])


class Fixture:
    """Pools with random KV in which the batch's requests share slots as their paths say.

    Args:
        paths: of the batch.
        seq_lens, query_lens: of the batch; query_lens None: decode.
        mixed: whether the step is a mixed one, not a prefill.
        room: tokens that requests may grow by.
        tensors: device of all tensors.
        page: tokens of a page of the pool; ends of path nodes are multiples of it.
        stock_backend: name of the stock backend.
        windows: ids of layers whose KV is in a sliding-window pool of their own.
        runner: attributes of the ModelRunner.
    """

    def __init__(
        self,
        paths: list[list[tuple[int, int, int]]],
        seq_lens: list[int],
        query_lens: list[int] | None = None,
        *,
        mixed: bool = False,
        settings: Settings | None = None,
        kv_dtype: torch.dtype = torch.float32,
        head_dim: int = HEAD_DIM,
        room: int = 8,
        tensors: str = "cpu",
        page: int = 1,
        stock_backend: str = "",
        windows: tuple[int, ...] = (),
        **runner: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.paths, self.seq_lens = paths, seq_lens
        self.query_lens = query_lens
        self.tensors = tensors
        total = sum(-(-length // page) * page for length in seq_lens) + 8 * page
        self.pool: Any = MHATokenToKVPool(
            total, page, kv_dtype, KV_HEADS, head_dim, LAYERS, tensors, False, enable_alt_stream=False
        )
        pools = [self.pool]
        if windows:
            self.pool = hybrid_pool(total, kv_dtype, head_dim, tensors, windows)
            pools = [self.pool.full_kv_pool, self.pool.swa_kv_pool]
        for buffer in (buffer for pool in pools for buffer in (*pool.k_buffer, *pool.v_buffer)):
            buffer.view(kv_dtype).copy_(torch.randn(buffer.shape, generator=generator))
        self.rows = ReqToTokenPool(len(seq_lens) + 1, max(seq_lens) + room, tensors, False)
        pages = torch.randperm(total // page, generator=generator) + 1
        slots = iter((pages[:, None] * page + torch.arange(page)).flatten().tolist())
        of_node: dict[int, list[int]] = {}
        for row, (path, length) in enumerate(zip(paths, seq_lens, strict=True), 1):
            filled: list[int] = []
            for node, start, end in path:
                of_node.setdefault(node, [next(slots) for _ in range(end - start)])
                filled += of_node[node]
            filled += [next(slots) for _ in range(-(-length // page) * page - len(filled))][: length - len(filled)]
            self.rows.req_to_token[row, :length] = torch.tensor(filled, dtype=torch.int32)
        self.layers = [RadixAttention(Q_HEADS, head_dim, head_dim**-0.5, KV_HEADS, i) for i in range(LAYERS)]
        self.model = torch.nn.ModuleList(self.layers)
        usual = {"device": "cpu", "dtype": torch.float32, "is_draft_worker": False, "use_mla_backend": False}
        usual |= {"token_to_kv_pool": self.pool, "req_to_token_pool": self.rows, "model": self.model}
        usual["kv_cache_dtype"] = kv_dtype
        usual["model_config"] = SimpleNamespace(is_encoder_decoder=False)
        self.runner = SimpleNamespace(**usual | runner)
        plugin_state.reset()
        self.state = plugin_state.of_process(settings or Settings(metrics=False), "0.5.20")
        self.state.serve(self.facts)
        self.state.stock_backend = stock_backend
        self.stock = self.make_stock()
        self.backend: Any = self.make_backend()
        prefix = [s - q for s, q in zip(seq_lens, query_lens or [1] * len(seq_lens), strict=True)]
        self.step = StepPaths(
            PrefixForest.from_paths(paths, prefix_lens=prefix),
            "decode" if query_lens is None else "mixed" if mixed else "extend",
            len(seq_lens),
            None if query_lens is None else np.array(query_lens, dtype=np.int64),
        )
        self.batch = self._batch()
        self.handed = Handed(self.step, self.batch.req_pool_indices, self.batch.seq_lens_cpu)

    @property
    def facts(self) -> ServerFacts:
        """What the runner says now."""
        return ServerFacts.of(self.runner)

    def make_stock(self) -> Any:
        """The stock backend."""
        return CountingStock(self.runner)

    def make_executor(self) -> Any:
        """The executor, or the reason why there is none."""
        return make_executor(self.facts, self.state.settings, self.state.stock_backend)

    def make_backend(self, stock: Any = None) -> Any:
        """A backend of ours over a stock backend; None: the fixture's."""
        executor = self.make_executor()
        kind: Any = StockOnly if isinstance(executor, Reason) else PrefixPackBackend
        return kind(self.facts, stock or self.stock, self.state, executor)

    @property
    def handover(self) -> Handover:
        return self.state.handover

    @property
    def fallbacks(self) -> dict[Reason, int]:
        return dict(self.state.counters.fallbacks)

    def _batch(self) -> ForwardBatch:
        lengths = torch.tensor(self.seq_lens, dtype=torch.int64)
        on_device = lengths.to(self.tensors)
        new = [1] * len(self.seq_lens) if self.query_lens is None else self.query_lens
        rows = torch.arange(1, len(self.seq_lens) + 1)
        written = [
            self.rows.req_to_token[row, length - fresh : length]
            for row, length, fresh in zip(rows.tolist(), self.seq_lens, new, strict=True)
        ]
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if self.query_lens is None else ForwardMode.EXTEND,
            batch_size=len(self.seq_lens),
            input_ids=torch.zeros(sum(new), dtype=torch.int64, device=self.tensors),
            req_pool_indices=rows.to(self.tensors),
            seq_lens=on_device,
            out_cache_loc=torch.cat(written).to(torch.int64),
            seq_lens_sum=sum(self.seq_lens),
            seq_lens_cpu=lengths,
        )
        if self.query_lens is not None:
            batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32, device=self.tensors)
            batch.extend_prefix_lens = (on_device - batch.extend_seq_lens).to(torch.int32)
        return batch

    def qkv(self, layer: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query as the models pass it, flat; key and value as RadixAttention passes them on."""
        generator = torch.Generator().manual_seed(100 + layer.layer_id)
        tokens = self.batch.input_ids.shape[0]

        def random(heads: int) -> torch.Tensor:
            return torch.randn((tokens, heads, layer.qk_head_dim), generator=generator).to(self.tensors, dtype)

        q, k, v = random(layer.tp_q_head_num), random(layer.tp_k_head_num), random(layer.tp_v_head_num)
        return q.flatten(1), k, v

    def grow(self, tokens: int) -> None:
        """The same decode batch, some steps later; the new positions' slots hold what they held."""
        for row, length in enumerate(self.seq_lens, 1):
            self.rows.req_to_token[row, length : length + tokens] = torch.arange(1, tokens + 1, dtype=torch.int32) + row
        self.seq_lens = [length + tokens for length in self.seq_lens]
        self.batch = self._batch()
        self.handed = Handed(self.step, self.batch.req_pool_indices, self.batch.seq_lens_cpu)

    def verify(self, **info: Any) -> None:
        """Makes a verify step of an extend step with equally many tokens a request; they are its drafts."""
        drafts = self.query_lens[0]
        assert self.query_lens == [drafts] * len(self.seq_lens)
        batch = self.batch
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens - drafts, batch.seq_lens_cpu - drafts
        batch.extend_seq_lens = batch.extend_prefix_lens = None
        batch.spec_info = SimpleNamespace(**{"topk": 1, "draft_token_num": drafts, **info})
        self.step = dataclasses.replace(self.step, mode="verify")
        self.handed = Handed(self.step, batch.req_pool_indices, batch.seq_lens_cpu)

    def prepare(self, handed: Handed | None = None) -> None:
        """The backend's decision on the batch, which was handed `handed` (default: the batch's paths)."""
        with self.handover.handed_over(self.handed if handed is None else handed):
            self.backend.init_forward_metadata(self.batch)

    def run(self, handed: Handed | None = None, **kwargs: Any) -> list[torch.Tensor]:
        """Every layer through our backend, inside a forward that was handed `handed` (default: the batch's paths)."""
        with self.handover.handed_over(self.handed if handed is None else handed):
            self.backend.init_forward_metadata(self.batch)
            return [
                self.backend.forward(*self.qkv(layer), layer, self.batch, save_kv_cache=True, **kwargs)
                for layer in self.layers
            ]

    def dense(self, layer: Any, **options: Any) -> torch.Tensor:
        """fp64 attention of one layer over what the pool holds; `options` are those of `reference_attention`."""
        q = self.qkv(layer)[0].cpu()
        out, _ = reference_attention(
            q.view(len(q), layer.tp_q_head_num, -1), self.pool.get_key_buffer(layer.layer_id).cpu(),
            self.pool.get_value_buffer(layer.layer_id).cpu(), req_to_token=self.rows.req_to_token.cpu(),
            req_pool_indices=self.batch.req_pool_indices.cpu(), seq_lens=torch.tensor(self.seq_lens),
            query_lens=self.query_lens or [1] * len(self.seq_lens), scale=layer.scaling, **options,
        )  # fmt: skip
        return out.flatten(1)

    def run_stock(self) -> list[torch.Tensor]:
        """Every layer through a torch_native backend of its own."""
        stock = TorchNativeAttnBackend(self.runner)
        stock.init_forward_metadata(self.batch)
        return [stock.forward(*self.qkv(layer), layer, self.batch, save_kv_cache=True) for layer in self.layers]
