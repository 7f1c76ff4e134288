"""Replays of a trace over SGLang's real prefix caches: real tree, real allocator, real locks and evictions, no model.

One token stands for one block of the trace, and the pool has as many slots as the block replay has blocks, so both
count in the same unit. Requests run one after the other: match, lock, make room, insert, unlock, as the scheduler does.
Unlike in the block replay, room is made before the request's own blocks are there, whole nodes are evicted, and of a
prompt that is larger than the pool only what fits is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from benchmarks.cache.blocks import Progress
from benchmarks.cache.trace import Prompt, Turn
from sgl_prefix_attn.pinning import prefix_keys

CACHES = ("RadixCache", "UnifiedRadixCache")
SGLANG_POLICIES = ("lru", "lfu", "slru", "priority")
REFRESH = "lru+refresh"  # least recently used, with the waiting requests' prefixes refreshed as SGLang 0.5.23 does
REFRESH_EVERY, REFRESHED_REQUESTS = 32, 128


@dataclass
class Request:
    """The fields of a request that the manager reads."""

    rid: int
    origin_input_ids: array[int]
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    extra_key: str | None = None
    session_id: str | None = None
    kv_hints: Any = None
    _prefixpack_keys: Sequence[int] = ()


@dataclass(frozen=True)
class Result:
    """What a replay saved.

    Attributes:
        saved: share of blocks saved.
        evictions_avoided: as in PinningCounters, in blocks.
    """

    saved: float
    evictions_avoided: int = 0


def make_cache(kind: str, slots: int, policy: str = "lru") -> Any:
    """A real cache over a real allocator with `slots` KV slots on the CPU."""
    import torch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(size=4, max_context_len=8, device="cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, need_sort=False),
        page_size=1,
        eviction_policy=policy,
        tree_components=(ComponentType.FULL,),
    )
    return {"RadixCache": RadixCache, "UnifiedRadixCache": UnifiedRadixCache}[kind](params)


def replay(
    prompts: Sequence[Prompt],
    pool: int,
    kind: str,
    policy: str,
    *,
    retention: bool = False,
    lookahead: int = 0,
    turns: Sequence[Turn] | None = None,
    remember: bool = True,
    progress: Progress = lambda: None,
) -> Result:
    """Share of blocks saved by a real cache with one of SGLang's policies, or with our retention over LRU.

    Args:
        turns: each prompt's place in its session; with them, the last turn of a session says that it is the last.
        remember: whether retention counts past use.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.common import evict_from_tree_cache
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sgl_prefix_attn.sglang_plugin.pinning.hints import OURS, Hints
    from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
    from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import lockable_tree
    from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Refused

    cache = make_cache(kind, pool, policy if policy in SGLANG_POLICIES else "lru")
    allocator = cache.token_to_kv_pool_allocator
    manager: PinningManager | None = None
    if retention:
        tree = lockable_tree(cache)
        assert not isinstance(tree, Refused), tree
        manager = PinningManager(
            tree, cache, budget=0, retention=True, remember=remember, lookahead=lookahead + 1, block=1
        )
        if turns is not None:
            manager.listen()
    requests = [
        Request(
            number,
            ids := array("q", prompt.blocks[:pool]),
            _prefixpack_keys=prefix_keys(ids[: prompt.full], 1),
        )
        for number, prompt in enumerate(prompts)
    ]
    for request, turn in zip(requests, turns or (), strict=turns is not None):
        request.session_id = f"session {turn.session}"
        payload = Hints(now=0.0, ends=turn.last).model_dump(mode="json")
        request.kv_hints = SimpleNamespace(actions=[SimpleNamespace(action_type=OURS, payload=payload)])
    saved = 0
    for number, request in enumerate(requests):
        progress()
        ids = request.origin_input_ids
        if policy == REFRESH and number % REFRESH_EVERY == 0:
            for waiting in requests[number : number + REFRESHED_REQUESTS]:
                cache.match_prefix(MatchPrefixParams(key=RadixKey(waiting.origin_input_ids)))
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        cached = len(match.device_indices)
        saved += cached
        receipt = cache.inc_lock_ref(match.last_device_node).to_dec_params()
        need = len(ids) - cached
        if manager is not None:
            if lookahead and manager.retention is not None:
                manager.retention.queue(requests[number : number + 1 + lookahead])
            manager.admitted(request, cached)
            manager.before_allocation(need)
        evict_from_tree_cache(cache, need)
        slots = allocator.alloc(need)
        assert slots is not None, "the pool cannot hold the request"
        cache.insert(
            InsertParams(key=RadixKey(ids), value=_joined(match.device_indices, slots), prev_prefix_len=cached)
        )
        cache.dec_lock_ref(match.last_device_node, receipt)
        if manager is not None:
            manager.on_request_released(request)
    assert allocator.available_size() + cache.evictable_size() == pool, "slots leaked"
    assert cache.protected_size() == 0, "locks leaked"
    total = sum(len(prompt.blocks) for prompt in prompts)
    if manager is None:
        return Result(saved / total)
    assert manager.counters.failures == 0, "pinning failed: see the log"
    return Result(saved / total, manager.counters.evictions_avoided)


def _joined(cached: Any, fresh: Any) -> Any:
    import torch

    return torch.cat([cached, fresh.to(torch.int64)])
