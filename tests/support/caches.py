"""SGLang's prefix caches over small pools, and what releases differ in when requests use them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.support.fake_tree import path_of

if not hasattr(schedule_batch.ReqKvInfo, "mark_kv_released"):
    pytest.skip("SGLang before 0.5.20 keeps the KV of a request elsewhere", allow_module_level=True)
try:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
except ImportError:  # up to 0.5.22
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.components import ComponentType


@dataclass
class NodeInfo:
    """`TreePathNodeInfo` of later SGLang versions."""

    node_id: int
    parent_id: int
    path_start: int
    path_end: int
    full_value_len: int | None
    num_children: int


class PathInfoCore:
    """The interface of later tree cores on top of a real tree: node ids in, paths out."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.is_eagle = core.is_eagle

    def root_node_handle(self, extra_key: str | None = None) -> int:
        return self._core.root_node_handle(extra_key)

    def node_by_id(self, node_id: int) -> Any:
        raise NotImplementedError("not ported to this core")

    def collect_path_info(self, ids: list[int]) -> tuple[tuple[NodeInfo, ...], ...]:
        paths = []
        for node_id in ids:
            path = []
            for link_id, begin, end in path_of(self._core.node_by_id(node_id)):
                link = self._core.node_by_id(link_id)
                path.append(NodeInfo(link_id, link.parent.id, begin, end, end - begin, len(link.children)))
            paths.append(tuple(path))
        return tuple(paths)


class PathInfoTree:
    """A tree that is readable only through `collect_path_info`."""

    def __init__(self, tree: UnifiedRadixCache) -> None:
        self.tree_core = PathInfoCore(tree.tree_core)
        self.disable = False


class TreeLockCache:
    """A real unified cache behind the interface of SGLang 0.5.23 with its native core: paths and lock objects."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self.tree_core = PathInfoCore(cache.tree_core)

    def lock(self, node_id: int) -> Any:
        return SimpleNamespace(node=node_id, receipt=self._cache.inc_lock_ref(node_id).to_dec_params())

    def unlock(self, lock: Any) -> None:
        self._cache.dec_lock_ref(lock.node, lock.receipt)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _Indices:
    """Up to 0.5.22: a match hands the request its KV slots, and the cache takes them back."""

    CACHES = ("RadixCache", "UnifiedRadixCache", "tree locks")
    TREES = ("objects", "node_by_id", "collect_path_info")

    def make(self, kind: str, params: CacheInitParams) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        if kind in ("RadixCache", "objects"):
            return RadixCache(params)
        cache = UnifiedRadixCache(params)
        return TreeLockCache(cache) if kind == "tree locks" else cache

    def cached(self, cache: Any, request: Any) -> torch.Tensor:
        """KV slots of what was matched of the request."""
        return request.prefix_indices

    def lock(self, cache: Any, request: Any) -> None:
        """The request has been matched and is admitted."""
        request.lock_receipt = cache.inc_lock_ref(request.last_node).to_dec_params()

    def extend(self, request: Any, start: int, end: int) -> None:
        """The next prefill computes these positions."""
        request.set_extend_range(start, end)

    def extended(self, request: Any) -> tuple[int, int]:
        """The positions that the next prefill computes."""
        return request.extend_range.start, request.extend_range.end

    def keep(self, cache: Any, request: Any, *, chunked: bool = False) -> None:
        """The prompt, or a chunk of it, has been computed."""
        cache.cache_unfinished_req(request, chunked=chunked)

    def release(self, cache: Any, pool: ReqToTokenPool, request: Any, *, insert: bool) -> None:
        """The request has finished, or was retracted."""
        cache.cache_finished_req(request, is_insert=insert, kv_len_to_handle=request.kv.kv_committed_len)
        pool.free(request)
        request.kv.mark_kv_released()


class _TreeLocks:
    """0.5.23: the cache keeps the slots, and requests hold lock objects."""

    CACHES = TREES = ("tree locks", "tree locks, Python core")

    def __init__(self) -> None:
        from sglang.srt.runtime_context import get_context

        get_context().override_server_args().install()

    def make(self, kind: str, params: CacheInitParams) -> Any:
        params.tree_core_backend = "python" if kind.endswith("Python core") else "rust"
        cache = UnifiedRadixCache(params)
        assert type(cache.tree_core).__module__.startswith("sglang.srt.mem_cache.rust") == kind.endswith("locks")
        return cache

    def cached(self, cache: Any, request: Any) -> torch.Tensor:
        return cache.prefix_device_indices(request)

    def lock(self, cache: Any, request: Any) -> None:
        request.lock = cache.lock(request.last_node)

    def extend(self, request: Any, start: int, end: int) -> None:
        request.prefix_len, request.extend_end = start, end

    def extended(self, request: Any) -> tuple[int, int]:
        return request.prefix_len, request.extend_end

    def keep(self, cache: Any, request: Any, *, chunked: bool = False) -> None:
        common.checkpoint_kv_cache(request, cache)

    def release(self, cache: Any, pool: ReqToTokenPool, request: Any, *, insert: bool) -> None:
        common.release_kv_cache(request, cache, checkpoint=insert)


torch.set_num_threads(1)  # tensors of a few dozen numbers

GENERATION: _Indices | _TreeLocks = _TreeLocks() if hasattr(UnifiedRadixCache, "lock") else _Indices()
CACHES = GENERATION.CACHES


class Pools:
    """A prefix cache over small pools on the CPU, and requests for it.

    Args:
        kind: of the cache: one of CACHES, or of `small_scheduler.TREES`.
        slots: KV slots.
        rows: requests at a time.
        context: tokens of a request.
        page: tokens of a page; `slots` is a multiple of it.
        eagle: whether nodes hold pairs of tokens, as with EAGLE.
        eviction: SGLang's --radix-eviction-policy.
    """

    def __init__(
        self, kind: str, *, slots: int, rows: int, context: int, page: int = 1, eagle: bool = False,
        eviction: str = "lru",
    ) -> None:  # fmt: skip
        self.pool = ReqToTokenPool(size=rows, max_context_len=context, device="cpu", enable_memory_saver=False)
        self.page = page
        if page == 1:
            self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, need_sort=False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page, torch.float32, "cpu", None, need_sort=False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.pool, token_to_kv_pool_allocator=self.allocator, page_size=page,
            tree_components=(ComponentType.FULL,), is_eagle=eagle, eviction_policy=eviction,
        )  # fmt: skip
        self.cache = GENERATION.make(kind, params)
        self._count = 0

    def request(self, tokens: Sequence[int], extra_key: str | None = None, new_tokens: int = 1 << 20) -> Req:
        self._count += 1
        sampling = SamplingParams(max_new_tokens=new_tokens)
        return Req(f"r{self._count}", "", array("q", tokens), sampling, extra_key=extra_key)

    def clear(self) -> None:
        """Empties the cache; no request may run."""
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()
