"""Replays of a trace over a pool of blocks, one request at a time: the limits, and our policy under the same rules.

Rules: a block counts as saved if it and all before it in the prompt are in the pool. Then all blocks of the prompt are
in the pool, and blocks of other prompts are given up until the pool's size is kept.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

from benchmarks.cache.trace import Prompt
from sgl_prefix_attn.pinning import CachedTree, Lookahead, NodeSpan, RetentionScores, ReuseMemory

NEVER = 1 << 60
Progress = Callable[[], object]


def limit(prompts: Sequence[Prompt], pool: int, lookahead: int, progress: Progress = lambda: None) -> float:
    """Share of blocks saved by the optimum that knows the next `lookahead` requests; 0 is LRU, NEVER the full optimum.

    What none of them uses goes first, least recently used first and deepest first; then what is used latest.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        for block in prompt.blocks:
            uses[block].append(number)
    last: dict[int, int] = {}
    by_last: list[tuple[int, int, int]] = []  # (last use, -depth, block); stale entries are skipped
    by_next: list[tuple[int, int, int, int]] = []  # (-next use, -depth, block, last use)
    saved = total = 0
    for number, prompt in enumerate(prompts):
        progress()
        total += len(prompt.blocks)
        saved += _leading(prompt.blocks, last)
        for depth, block in enumerate(prompt.blocks):
            last[block] = number
            heapq.heappush(by_last, (number, -depth, block))
        while len(last) > pool and by_last[0][0] < number:
            used, depth, block = heapq.heappop(by_last)
            if last.get(block) != used:
                continue
            later = bisect_right(uses[block], number)
            coming = uses[block][later] if later < len(uses[block]) else NEVER
            if coming <= number + lookahead:
                heapq.heappush(by_next, (-coming, depth, block, used))
            else:
                del last[block]
        while len(last) > pool and by_next:
            _, _, block, used = heapq.heappop(by_next)
            if last.get(block) == used:
                del last[block]
    return saved / total


def ours(
    prompts: Sequence[Prompt], pool: int, lookahead: int, remember: bool = True, progress: Progress = lambda: None
) -> float:
    """Share of blocks saved by the policy of `sgl_prefix_attn.pinning`, with a queue of `lookahead` requests."""
    queue = Lookahead(lookahead)
    scores = RetentionScores(ReuseMemory() if remember else None, queue)
    cached = CachedTree(block=1, scores=scores)
    for number, prompt in enumerate(prompts[:lookahead]):
        queue.add(number, prompt.blocks[: prompt.full])
    present: dict[int, int] = {}
    saved = total = 0
    for number, prompt in enumerate(prompts):
        progress()
        if lookahead and number + lookahead < len(prompts):
            coming = prompts[number + lookahead]
            queue.add(number + lookahead, coming.blocks[: coming.full])
        keys = prompt.blocks[: prompt.full]
        scores.scheduled(number, keys)
        total += len(prompt.blocks)
        saved += _leading(prompt.blocks, present)
        cached.used((NodeSpan(None, block, depth, depth + 1, True) for depth, block in enumerate(prompt.blocks)), keys)
        present.update(dict.fromkeys(prompt.blocks, number))
        if len(present) > pool:
            running = frozenset(prompt.blocks)
            cached.recheck(len(cached), lambda node, ids=running: node.id in ids)
            for node in cached.select_victims(len(present) - pool, lambda node, ids=running: node.id in ids):
                cached.drop(node.id)
                del present[node.id]
    return saved / total


def _leading(blocks: Sequence[int], present: dict[int, int]) -> int:
    for depth, block in enumerate(blocks):
        if block not in present:
            return depth
    return len(blocks)
