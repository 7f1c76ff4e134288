"""Chooses which nodes of one prefix cache are evicted: those of the lowest retention score.

Before SGLang allocates, retention evicts what is missing through the cache's own eviction of single leaves. SGLang then
finds enough free tokens and evicts nothing. Nodes stay unlocked all the time, so SGLang's admission counts them as
evictable and cannot starve.

An eviction frees at least a fixed part of the pool, so decode steps seldom evict. It reads the evicted nodes and those
in use, never all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from sgl_prefix_attn.offline.queue_order import SharedPrefix
from sgl_prefix_attn.pinning import (
    CachedNode,
    CachedTree,
    Lookahead,
    NodeSpan,
    Pin,
    RetentionScores,
    ReuseMemory,
    StoredPrompt,
)
from sgl_prefix_attn.pinning import prefix_keys as keys_of
from sgl_prefix_attn.pinning.cached_tree import Use
from sgl_prefix_attn.pinning.ledger import MAX_PINS
from sgl_prefix_attn.sglang_plugin.pinning.hints import Hints, hints_of
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningCounters
from sgl_prefix_attn.sglang_plugin.pinning.sessions import Owner, Sessions, bounded
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import LockableTree, Namespace
from sgl_prefix_attn.sglang_plugin.scheduling.offline_prefixes import OfflinePrefixes

_QUANTA = 256  # parts of the pool; an eviction frees at least one, and nodes are not split for less
_ANNOUNCED_PART = 2  # the prefixes of offline jobs are kept up to this part of the pool: a half
_CHECKED = 32  # leaves in use, and leaves in total, that each eviction checks besides those it evicts


class _Prompt(NamedTuple):
    """A request's prompt, as it came."""

    keys: Sequence[int]
    tokens: Sequence[int]
    namespace: Namespace


class Retention:
    """The cached nodes, their retention scores, and their eviction.

    Args:
        tree: the cache's adapter.
        cache: the cache itself: its allocator's `size`.
        lookahead: waiting requests that count.
        block: tokens per prefix key.
        counters: counts avoided evictions and recomputed tokens.
        remember: whether past use counts. Otherwise the least recently used goes first, but for hints and sessions.
        hint_tokens: tokens that hints may keep.

    Attributes:
        scores: retention scores of the prefixes.
        offline: shared prefixes of offline jobs.
        sessions: the last turns of sessions.
        listens: whether hints and sessions of requests are read.
    """

    def __init__(
        self,
        tree: LockableTree,
        cache: Any,
        lookahead: int,
        block: int,
        counters: PinningCounters,
        *,
        remember: bool = True,
        hint_tokens: int = 0,
    ) -> None:
        self._memory = ReuseMemory() if remember else None
        self._cache = cache
        pool = cache.token_to_kv_pool_allocator.size
        most = max(1, pool // _ANNOUNCED_PART // block)
        self.scores = RetentionScores(
            self._memory, Lookahead(lookahead), max_announced=most, max_retained=hint_tokens // block
        )
        self._tree = tree
        self._quantum = max(1, pool // _QUANTA)
        self._block = block
        self._page = tree.page_size
        self._counters = counters
        self._cached = CachedTree(block, self.scores, self._edge)
        # Requests in their prefill by id, and the keys that each computes for the first time.
        self._computing: dict[str, tuple[Any, Sequence[int]]] = {}
        self._coming: set[int] = set()
        self._avoided: dict[int, int] = {}  # last use by node id, when an avoided eviction of the node was counted
        # Length and last key by pin id, least recently asked for first: pins are compared whenever tokens are missing.
        self._pin_keys: dict[int, tuple[int, int | None]] = {}
        self.offline = OfflinePrefixes(self.announce_shared)
        self.sessions = Sessions(block)
        self.listens = False

    def announce_shared(self, request: Any, shared: SharedPrefix, uses: int) -> None:
        """Announces a span of a request's prompt, without the tokens before it."""
        self.scores.announce(self._shared_keys(request, shared), uses)

    def queue(self, waiting: Iterable[Any]) -> None:
        """Takes over the waiting queue, in the order in which it will be served."""
        requests = {request.rid: request for request in islice(waiting, self.scores.lookahead.limit)}
        self.scores.follow(list(requests), lambda rid: self._on_request_queued(requests[rid]))

    def admitted(self, request: Any, cached_tokens: int) -> None:
        """A request was admitted and found `cached_tokens` of its prompt in the cache."""
        if getattr(request, _COUNTED, False):  # a retracted request that comes back is no further use
            self.scores.remove(request.rid)
            return
        setattr(request, _COUNTED, True)
        setattr(request, _FOUND, cached_tokens)
        keys = self._prompt_keys(request)
        self._count_recomputed(request, keys, cached_tokens)
        if self.listens:
            self._read_hints(request)
            self._supersede(Owner.of_request(request), request, keys, cached_tokens)
        announced = {key for shared in self.offline.of(request) for key in self._shared_keys(request, shared)}
        self.scores.scheduled(request.rid, keys, announced)

    def on_request_released(self, request: Any, tokens: Sequence[int], namespace: Namespace) -> None:
        """A request has ended; these tokens, its prompt first, are cached and unlocked."""
        _, coming = self._computing.pop(request.rid, (None, ()))
        self._coming.difference_update(coming)
        keys = self._prompt_keys(request)
        if request.output_ids:
            keys = keys_of(tokens, self._block, namespace.text)
        prompt = _Prompt(keys, tokens, namespace)
        handle = self._tree.find(tokens, namespace)
        if handle is not None:
            path = self._tree.path(handle)
            stored = self._store(prompt, path)
            owner = Owner.of_request(request) if self.listens else None
            self._settle(self._cached.used(path, stored, stored, Use(owner, getattr(request, _FOUND, None))))
            hints = getattr(request, _HINTS, None)
            if hints is not None:
                self._keep(hints, keys, bounded(namespace.text))
            self._split_where_scores_change(prompt, stored, path)
            if owner is not None:
                prompt_keys = self._prompt_keys(request)
                closed = self.sessions.finished(owner, path[-1].id, prompt_keys, request.origin_input_ids)
                if closed or (hints is not None and hints.ends):
                    self.scores.give_up(keys)
                    self._counters.superseded_tokens += self._cached.supersede(path[-1].id, owner, 0)
                self._counters.retained_tokens = len(self.scores.retained) * self._block

    def close_session(self, session: str) -> None:
        """A session is over. Without namespace: only sessions without one can be closed by their id."""
        owner = Owner(None, session)
        turn = self.sessions.close(owner)
        if turn is not None:
            self._counters.superseded_tokens += self._cached.supersede(turn.leaf, owner, 0)

    def clear(self) -> None:
        """The tree was reset."""
        self._cached.clear()
        self._avoided.clear()
        self._computing.clear()
        self._coming.clear()
        self.scores.clear()
        self.offline.clear()
        self.sessions.clear()

    def score_of_pin(self, pin: Pin) -> float:
        """Retention score of a pin's prefix."""
        length, key = self._pin_keys.pop(pin.id, (0, None))
        if length != len(pin.tokens):
            keys = keys_of(pin.tokens, self._block, pin.namespace)
            length, key = len(pin.tokens), keys[-1] if keys else None
        self._pin_keys[pin.id] = length, key
        while len(self._pin_keys) > MAX_PINS:
            del self._pin_keys[next(iter(self._pin_keys))]
        return self.scores.of(key)

    def evict(self, tokens: int) -> None:
        """Evicts at least `tokens` tokens and at least 1/256 of the pool, as far as there are evictable nodes."""
        if not self._tree.can_evict:
            return
        self._check_some_leaves()
        missing, unknown = max(tokens, self._quantum), self._unknown()
        if unknown:
            missing = self._evict_lowest(missing, tokens, below=0.0) - unknown
        self._evict_lowest(missing, tokens)

    # Details ----------------------------------------------------------------------------------------------------------

    def _read_hints(self, request: Any) -> None:
        hints = hints_of(request)
        if hints is not None:
            self._counters.hints_ignored += hints.ignored
            self.scores.expire(hints.now)
            if hints.spans or hints.ends:
                setattr(request, _HINTS, hints)

    def _supersede(self, owner: Owner, request: Any, keys: Sequence[int], cached_tokens: int) -> None:
        """What only the session's last turn used, and this one does not, goes first from now on."""
        self.sessions.admitted(owner)
        turn = self.sessions.superseded(owner, keys, request.origin_input_ids)
        if turn is None or cached_tokens < turn.blocks * self._block:
            return
        node = self._cached.get(turn.leaf)
        if node is not None and self._tree.alive(node.handle):
            # The match of this request may have split it.
            self._settle(self._cached.place(self._tree.path(node.handle)))
            self._counters.superseded_tokens += self._cached.supersede(turn.leaf, owner, cached_tokens)

    def _keep(self, hints: Hints, keys: Sequence[int], namespace: str | None) -> None:
        """Executes the hints of a request that has ended."""
        for begin, end, priority, seconds in hints.spans:
            last = len(keys) if end is None else end // self._block
            if priority == 0:
                self.scores.give_up(keys[begin // self._block : last])
            elif not self.scores.retained.budget:
                self._counters.hints_ignored += 1
                continue
            else:
                self.scores.retain(
                    keys[:last], priority, math.inf if seconds is None else hints.now + seconds, namespace
                )
            self._counters.hints_executed += 1
        self._counters.hints_executed += hints.ends

    def _unknown(self) -> int:
        """Evictable tokens that were cached before this began. They were used least recently: SGLang evicts them."""
        if self._memory is not None:  # it began with the server
            return 0
        return max(0, int(self._cache.evictable_size()) - self._cached.tokens)

    def _evict_lowest(self, missing: int, tokens: int, below: float = math.inf) -> int:
        """Evicts so many tokens, of nodes whose score is below that; returns how many are still missing."""
        victims = self._cached.select_victims(missing, self._in_use, below=below)
        if victims:
            self._count_avoided(tokens, {node.id for node in victims})
        while victims and missing > 0:
            for node in victims:
                missing -= self._evict(node, missing)
            victims = self._cached.select_victims(missing, self._in_use, below=below)
        return missing

    def _evict(self, node: CachedNode, wanted: int) -> int:
        """Evicts a selected node, or its end if that is enough; returns how many tokens that freed."""
        if node.children:  # a node below it could not be evicted
            return 0
        if not self._tree.alive(node.handle):
            self._forget(node)
            return 0
        # SGLang may have split the node when it matched a request that has not ended yet.
        self._settle(self._cached.place(self._tree.path(node.handle)))
        if node.tokens - wanted >= self._quantum:
            self._split_at(node, node.end - wanted)
        freed = self._tree.evict(node.handle)
        if freed:
            self._forget(node)
        else:
            self._cached.set_in_use(node)
        return freed

    def _split_at(self, node: CachedNode, position: int) -> None:
        """Splits a node, so that it begins at this position."""
        if node.prompt is None:
            return
        handle = self._tree.find(node.prompt.tokens(0, position), node.prompt.namespace)
        if handle is not None:
            self._settle(self._cached.seen(self._tree.path(handle), node.keys, node.prompt))

    def _forget(self, node: CachedNode) -> None:
        self._cached.drop(node.id)
        self._avoided.pop(node.id, None)

    def _check_some_leaves(self) -> None:
        """Finds leaves that are no longer in use, and leaves that SGLang evicted by itself."""
        self._cached.recheck(_CHECKED, self._in_use)
        for node in self._cached.next_leaves(_CHECKED):
            if not self._tree.alive(node.handle):
                self._forget(node)

    def _count_avoided(self, tokens: int, going: set[int]) -> None:
        """Counts nodes that the least-recently-used order would evict for these tokens, except those in `going`."""
        for node in self._cached.select_victims(tokens, self._in_use, by_use=True):
            if node.id not in going and self._avoided.get(node.id) != node.last_use:
                self._avoided[node.id] = node.last_use
                self._counters.evictions_avoided += node.tokens

    def _count_recomputed(self, request: Any, keys: Sequence[int], cached_tokens: int) -> None:
        """Counts prompt tokens that were computed before; not those whose first prefill still runs."""
        for rid, (other, coming) in list(self._computing.items()):
            if other.output_ids or other.finished():
                del self._computing[rid]
                self._coming.difference_update(coming)
        if self._memory is None:
            return
        known = self._memory.known_prefix(keys)
        self._computing[request.rid] = request, keys[known:]
        computed = next((index for index, key in enumerate(keys[:known]) if key in self._coming), known)
        self._coming.update(keys[known:])
        self._counters.recomputed_tokens += max(0, computed * self._block - cached_tokens)

    def _in_use(self, node: CachedNode) -> bool:
        return self._tree.in_use(node.handle)

    def _edge(self, prompt: StoredPrompt, begin: int) -> Hashable:
        """Equal for prompts of a namespace with the same next page: a split separates only nodes of such prompts."""
        return prompt.namespace, hash(tuple(prompt.tokens(begin, begin + self._page)))

    def _store(self, prompt: _Prompt, path: Sequence[NodeSpan]) -> StoredPrompt:
        """The prompt as the nodes of its path keep it: no longer than they are."""
        end = path[-1].end
        tokens, keys = prompt.tokens[:end], prompt.keys[: -(-end // self._block)]
        for span in reversed(path):
            known = self._cached.get(span.id)
            if known is not None:
                return StoredPrompt(tokens, keys, self._block, prompt.namespace, known.prompt, span.end)
        return StoredPrompt(tokens, keys, self._block, prompt.namespace)

    def _prompt_keys(self, request: Any) -> Sequence[int]:
        keys = getattr(request, _KEYS, None)
        if keys is None:
            keys = keys_of(request.origin_input_ids, self._block, Namespace.of_request(request).text)
            setattr(request, _KEYS, keys)
        return keys

    def _shared_keys(self, request: Any, shared: SharedPrefix) -> Sequence[int]:
        """Keys of a span of a request's prompt."""
        # Of the whole prompt: hashing each span with all tokens before it would be quadratic.
        return self._prompt_keys(request)[shared.begin // self._block : shared.end // self._block]

    def _on_request_queued(self, request: Any) -> Sequence[int]:
        """Splits off the part of the cache that a waiting request will use. Returns the request's keys."""
        keys = self._prompt_keys(request)
        namespace = Namespace.of_request(request)
        handle = self._tree.find(request.origin_input_ids, namespace)
        if handle is not None:
            path = self._tree.path(handle)
            prompt = self._store(_Prompt(keys, request.origin_input_ids, namespace), path)
            self._settle(self._cached.seen(path, prompt, prompt))
        return keys

    def _split_where_scores_change(self, prompt: _Prompt, stored: StoredPrompt, path: Sequence[NodeSpan]) -> None:
        """Splits the path of a request where the score changes.

        A node is kept or evicted as a whole. The end of a prompt is often used by none of the waiting requests that
        use its beginning. Its beginning may have been used before and evicted since. The tokens after the last full
        block have no score.
        """
        bounds = {0, *(node.end for node in path)}
        for position in self._score_changes(prompt):
            if position not in bounds:
                handle = self._tree.find(prompt.tokens[:position], prompt.namespace)
                if handle is not None:
                    self._settle(self._cached.seen(self._tree.path(handle), stored, stored))

    def _score_changes(self, prompt: _Prompt) -> Iterator[int]:
        scores, next_use = self.scores, self.scores.lookahead.next_use
        before = None
        for index, key in enumerate(prompt.keys):
            after = (scores.uses(key), next_use(key), scores.retained.priority(key))
            if after != before:
                yield index * self._block
            before = after
        full = len(prompt.keys) * self._block
        if 2 * (len(prompt.tokens) - full) >= self._block:
            yield full

    def _settle(self, moved: list[int]) -> None:
        """Places nodes that splits may have moved."""
        while moved:
            by_parent: dict[int, list[int]] = {}
            for node_id in moved:
                by_parent.setdefault(self._cached.parent_of(node_id), []).append(node_id)
            moved = []
            for parent, ids in by_parent.items():
                nodes = [node for node in map(self._cached.get, ids) if node is not None]
                for path in self._tree.moved(ids, [node.handle for node in nodes], parent):
                    moved += self._cached.place(path) if path else []


_COUNTED = "_prefixpack_counted"
_KEYS = "_prefixpack_keys"
_FOUND = "_prefixpack_found"
_HINTS = "_prefixpack_hints"
