"""SGLang's prefix caches and what its scheduler does with them, as far as releases differ in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.support.small_scheduler import PathInfoCore

try:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
except ImportError:  # up to 0.5.22
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.components import ComponentType


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

    def make(self, kind: str, params: CacheInitParams) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        if kind == "RadixCache":
            return RadixCache(params)
        cache = UnifiedRadixCache(params)
        return TreeLockCache(cache) if kind == "tree locks" else cache

    def cached(self, cache: Any, request: Any) -> torch.Tensor:
        """KV slots of what was matched of the request."""
        return request.prefix_indices

    def keep(self, cache: Any, request: Any) -> None:
        """The prompt has been computed."""
        cache.cache_unfinished_req(request)

    def release(self, cache: Any, pool: ReqToTokenPool, request: Any, *, insert: bool) -> None:
        """The request has finished, or was retracted."""
        cache.cache_finished_req(request, is_insert=insert, kv_len_to_handle=request.kv.kv_committed_len)
        pool.free(request)
        request.kv.mark_kv_released()


class _TreeLocks:
    """0.5.23: the cache keeps the slots, and requests hold lock objects."""

    CACHES = ("tree locks", "tree locks, Python core")

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

    def keep(self, cache: Any, request: Any) -> None:
        common.checkpoint_kv_cache(request, cache)

    def release(self, cache: Any, pool: ReqToTokenPool, request: Any, *, insert: bool) -> None:
        common.release_kv_cache(request, cache, checkpoint=insert)


torch.set_num_threads(1)  # tensors of a few dozen numbers

GENERATION: _Indices | _TreeLocks = _TreeLocks() if hasattr(UnifiedRadixCache, "lock") else _Indices()
CACHES = GENERATION.CACHES


def make_cache(kind: str, slots: int, pool: ReqToTokenPool) -> Any:
    """An empty prefix cache over an allocator of `slots` KV slots, page size 1."""
    return GENERATION.make(
        kind,
        CacheInitParams(
            disable=False,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, need_sort=False),
            page_size=1,
            tree_components=(ComponentType.FULL,),
        ),
    )
