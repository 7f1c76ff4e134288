"""Requests for the engines in their order: one `EngineQueue` for each engine, with its share of the prefix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sgl_prefix_attn.offline.group_order import GroupOrder
from sgl_prefix_attn.offline.messages import Task
from sgl_prefix_attn.offline.output_lengths import OutputLengths
from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.prompts import Int32Array, Int64Array, Prompts
from sgl_prefix_attn.offline.queue_order import WORTH_WAITING_FOR, Place, SharedPrefix
from sgl_prefix_attn.offline.sharding import shards


@dataclass(frozen=True)
class Work:
    """Requests that are to run.

    Attributes:
        tasks: what engines get of each, without its place.
        prompts: request r has the prompt numbered r. A first token above all of the model's keeps a prompt apart.
        limits: [requests] most tokens that a sample may have.
        minimums: [requests] least tokens of a sample.
        samples: [requests] sequences that are generated.
        alone: requests that get no place.
    """

    tasks: Sequence[Task]
    prompts: Prompts
    limits: Int64Array
    minimums: Int64Array
    samples: Int64Array
    alone: frozenset[int] = frozenset()


class JobPlan:
    """Splits work over engines and orders the work of each.

    Args:
        name: of the job; it tells the engine which requests belong together.
        grouped: False leaves the requests in the order of the file, as plain ones.
    """

    def __init__(self, work: Work, engines: int, name: str, *, grouped: bool = True) -> None:
        self.work = work
        self.tree = PrefixTree(work.prompts)
        self.lengths = OutputLengths(work.limits, np.minimum(work.minimums, work.limits))
        self._samples = work.samples
        decode = self.lengths.estimates() * self._samples
        parts = [np.arange(len(work.tasks))] if engines == 1 else shards(self.tree, decode, engines)
        self.queues = [EngineQueue(self, part, f"{name}-{number}", grouped) for number, part in enumerate(parts)]

    def learn(self, request: int, output_tokens: int) -> None:
        """A request has ended with this many output tokens, over all its samples."""
        self.lengths.learn(request, round(output_tokens / int(self._samples[request])))

    def decode_tokens(self) -> Any:
        """[requests] expected output of all samples."""
        return self.lengths.estimates() * self._samples


class EngineQueue:
    """The requests of one engine, in running order."""

    def __init__(self, plan: JobPlan, part: Int64Array, name: str, grouped: bool) -> None:
        self._plan = plan
        self._name = name
        self._version = plan.lengths.version
        self._estimates = plan.lengths.estimates()
        self._last: int | None = None
        self._handed_out = 0
        self.left = len(part)
        tree = plan.tree if len(part) == len(plan.work.tasks) else plan.tree.restricted(part)
        self._order = GroupOrder(tree, plan.decode_tokens()) if grouped else None
        self._tail_node, self._begin, self._end = tree.tail_node, tree.node_begin, tree.node_end
        self._above = _above(tree)
        uses = np.concatenate([[0], np.cumsum(_engine_requests(plan.work.samples[tree.order]))])
        self._uses = uses[tree.node_last] - uses[tree.node_first]
        self._in_file_order = iter(part.tolist())

    def next(self) -> Task | None:
        """The next request to hand to the engine, None when there are no more."""
        if self.left == 0:
            return None
        self.left -= 1
        plan, work = self._plan, self._plan.work
        if self._order is None:
            return self._task(next(self._in_file_order), None)
        if self._version != plan.lengths.version:
            self._version, self._estimates = plan.lengths.version, plan.lengths.estimates()
            self._order.update(plan.decode_tokens())
        request = next(self._order)
        shared = 0 if self._last is None else _in_common(work.prompts[self._last], work.prompts[request])
        decode = round(float(self._estimates[request]))
        place = Place(self._name, self._handed_out, shared, decode, self._prefixes(request))
        self._last = request
        self._handed_out += 1
        return self._task(request, place)

    def _prefixes(self, request: int) -> tuple[SharedPrefix, ...]:
        """Shared spans of the request's prompt, without those too short to wait for."""
        prefixes = []
        node = int(self._tail_node[request])
        if node >= 0 and not _is_long(self._begin[node], self._end[node]):
            node = int(self._above[node])
        while node >= 0:
            begin, end, uses = int(self._begin[node]), int(self._end[node]), int(self._uses[node])
            prefixes.append(SharedPrefix(node, begin, end, uses))
            node = int(self._above[node])
        return tuple(reversed(prefixes))

    def _task(self, request: int, place: Place | None) -> Task:
        task = self._plan.work.tasks[request]
        if place is None or request in self._plan.work.alone:
            return task
        return replace(task, place=place.encode())


def _is_long(begin: Any, end: Any) -> Any:
    """Whether a node's span is worth waiting for; of numbers or of arrays."""
    return end - begin >= WORTH_WAITING_FOR


def _above(tree: PrefixTree) -> Int32Array:
    """[num_nodes] the nearest ancestor with a long span, or -1: one request may be below thousands of short nodes."""
    parent, is_long = tree.node_parent.tolist(), _is_long(tree.node_begin, tree.node_end).tolist()
    above: list[int] = []
    for node in parent:  # parents are numbered lower
        above.append(node if node < 0 or is_long[node] else above[node])
    return np.array(above, dtype=np.int32)


def _engine_requests(samples: Int64Array) -> Int64Array:
    """Requests that SGLang makes of each request: one for each sample, and one for the prompt of several samples."""
    return samples + (samples > 1)


def _in_common(a: Int32Array, b: Int32Array) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if different.size else length
