"""SGLang's requests, pools and radix trees, driven by the calls of its scheduler, without a server or a model.

A batch is a plain object with the fields of ScheduleBatch that the tracker reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.support.caches import GENERATION, PathInfoTree, Pools
from tests.support.fake_tree import path_of


@dataclass
class Batch:
    """The fields of ScheduleBatch that the tracker and one-token steps read."""

    reqs: list[Req]
    tree_cache: Any
    forward_mode: ForwardMode
    seq_lens_cpu: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: list[int] | None = None
    extend_lens: list[int] | None = None
    decoding_reqs: list[Req] | None = None
    spec_algorithm: Any = None
    spec_info: Any = None
    encoder_lens: Any = None
    return_logprob: bool = False
    return_hidden_states: bool = False
    is_prefill_only: bool = False
    input_embeds: Any = None
    replace_embeds: Any = None
    multimodal_inputs: list[Any] | None = None
    global_num_tokens: list[int] | None = None
    dllm_config: Any = None

    def __post_init__(self) -> None:
        self.seq_lens = self.seq_lens_cpu  # on the device


TREES = GENERATION.TREES


class SmallScheduler(Pools):
    """Admits, prefills, decodes, finishes and retracts requests over one real radix tree.

    Args:
        kind: one of TREES.
        slots: KV slots.
    """

    def __init__(self, kind: str, *, slots: int = 4096, rows: int = 256, context: int = 4096) -> None:
        super().__init__(kind, slots=slots, rows=rows, context=context)
        self.kind, self.tree = kind, self.cache
        self.shown_tree = PathInfoTree(self.tree) if kind == "collect_path_info" else self.tree
        self.running: list[Req] = []
        self.lengths: dict[int, int] = {}  # KV length by id(request)
        self.ranges: dict[int, tuple[int, int]] = {}  # what the last prefill of a request computes, by its id

    def match(self, request: Req, upto: int | None = None) -> None:
        """Matches the request with the tree, takes a row and KV for its tokens, and locks its path."""
        request.init_next_round_input(self.tree)
        total = len(request.full_untruncated_fill_ids)
        end = total if upto is None else min(upto, total)
        GENERATION.lock(self.tree, request)
        self._take(request, max(end, len(GENERATION.cached(self.tree, request)) + 1))

    def join(self, prompt: list[int]) -> Req:
        """A request that has been prefilled, and decodes."""
        request = self.request(prompt)
        self.match(request)
        self.prefill_done(request)
        self.running.append(request)
        return request

    def receive(self, request: Req) -> None:
        """KV of a matched and locked request arrives from a prefill server."""
        self._take(request, len(request.origin_input_ids))
        request.init_next_round_input(None)
        self._extend(request, len(GENERATION.cached(self.tree, request)), request.kv.kv_committed_len)
        self.prefill_done(request)

    def _take(self, request: Req, end: int) -> None:
        found = GENERATION.cached(self.tree, request)
        start = len(found)
        self._extend(request, start, end)
        self.pool.alloc([request])
        row = self.pool.req_to_token[request.kv.req_pool_idx]
        row[:start] = found.to(torch.int32)
        row[start:end] = self._alloc(end - start)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = end
        self.lengths[id(request)] = end

    def _extend(self, request: Req, start: int, end: int) -> None:
        GENERATION.extend(request, start, end)
        self.ranges[id(request)] = start, end

    def extend_batch(self, requests: list[Req], decoding: list[Req] = ()) -> Batch:  # type: ignore[assignment]
        """The batch that prefills `requests` and, if mixed, decodes `decoding`."""
        everyone = [*requests, *decoding]
        batch = self._batch(everyone, ForwardMode.MIXED if decoding else ForwardMode.EXTEND)
        ranges = [self.ranges[id(request)] for request in requests]
        ranges += [(self.lengths[id(request)] - 1, self.lengths[id(request)]) for request in decoding]
        batch.prefix_lens = [start for start, _ in ranges]
        batch.extend_lens = [end - start for start, end in ranges]
        batch.decoding_reqs = list(decoding) or None
        return batch

    def prefill_done(self, request: Req, *, chunked: bool = False) -> None:
        """Inserts the tokens of a finished prefill into the tree."""
        GENERATION.keep(self.tree, request, chunked=chunked)

    def next_chunk(self, request: Req, size: int) -> None:
        """Takes KV for the next chunk of a chunked prefill."""
        start = self.lengths[id(request)]
        end = min(start + size, len(request.full_untruncated_fill_ids))
        self._extend(request, start, end)
        self.pool.req_to_token[request.kv.req_pool_idx, start:end] = self._alloc(end - start)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = end
        self.lengths[id(request)] = end

    def decode(self) -> None:
        """Appends one token to each running request."""
        for request in self.running:
            position = self.lengths[id(request)]
            self.pool.req_to_token[request.kv.req_pool_idx, position] = self._alloc(1)[0]
            self.lengths[id(request)] = position + 1
            request.output_ids.append(7_000_000 + self._count * 1000 + position)
            request.kv.kv_allocated_len = request.kv.kv_committed_len = position + 1

    def decode_batch(self, requests: list[Req] | None = None) -> Batch:
        """The batch of all that run, or of a microbatch."""
        return self._batch(self.running if requests is None else requests, ForwardMode.DECODE)

    def verify_batch(self, drafts: int) -> Batch:
        """The batch in which the target model checks as many drafts of each request. Their KV is not counted yet."""
        batch = self._batch(self.running, ForwardMode.TARGET_VERIFY)
        batch.spec_algorithm, batch.spec_info = SpeculativeAlgorithm.EAGLE, SimpleNamespace(draft_token_num=drafts)
        return batch

    def finish(self, request: Req, *, insert: bool = True) -> None:
        """Ends a request and gives its KV to the tree or the pool. It stays in `running` until `filter`."""
        request.finished_reason = FINISH_LENGTH(length=1)
        self._release(request, insert=insert)

    def filter(self) -> None:
        self.running = [request for request in self.running if not request.finished()]

    def retract(self, request: Req) -> None:
        self.running.remove(request)
        self._release(request, insert=False)
        request.reset_for_retract()

    def evict(self, tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=tokens))

    def flush(self) -> None:
        assert not self.running
        self.clear()

    def path(self, request: Req) -> list[tuple[int, int, int]]:
        """(node id, start, end) of each node from the root to the request's node, read from the tree."""
        node = request.last_node
        if node is None:
            return []
        if self.kind == "tree locks":  # in native code
            (path,) = self.tree.tree_core.collect_path_info([node])
            return [(link.node_id, link.path_start, link.path_end) for link in path]
        if isinstance(node, int):
            node = self.tree.tree_core.node_by_id(node)
        return path_of(node)

    def _batch(self, requests: list[Req], mode: ForwardMode) -> Batch:
        return Batch(
            reqs=list(requests),
            tree_cache=self.shown_tree,
            forward_mode=mode,
            seq_lens_cpu=torch.tensor([self.lengths[id(r)] for r in requests], dtype=torch.int64),
            req_pool_indices=torch.tensor([r.kv.req_pool_idx or 0 for r in requests], dtype=torch.int64),
        )

    def _alloc(self, size: int) -> torch.Tensor:
        if self.allocator.available_size() < size:
            self.evict(size)
        slots = self.allocator.alloc(size)
        assert slots is not None, "the test needs more KV slots"
        return slots.to(torch.int32)

    def _release(self, request: Req, *, insert: bool) -> None:
        GENERATION.release(self.tree, self.pool, request, insert=insert)
