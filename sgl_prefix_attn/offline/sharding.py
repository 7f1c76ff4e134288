"""Prompts of each engine. A group stays whole unless it exceeds an engine's fair share of the work."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn.offline.output_lengths import Float64Array
from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.prompts import Int64Array


def shards(
    tree: PrefixTree, decode_tokens: Float64Array, engines: int, groups: npt.NDArray[np.integer] | None = None
) -> list[Int64Array]:
    """Prompts for each engine, about equal in work: tokens to prefill, a shared one once an engine, and to decode.

    A group of more than a fair share is cut below its common prefix: where the work comes out most even, what both
    sides of a cut share counted for both. It stays whole where a cut would not make the busiest engine's work less.
    All other groups stay whole.

    Args:
        groups: [prompts] group of each, -1 for none; default: those of `tree.enlarged_first_level()`.

    Returns:
        For each engine the numbers of its prompts, ascending. Engines without work get none.

    Raises:
        ValueError: engines below 1.
    """
    if engines < 1:
        raise ValueError(f"engines={engines}; expected at least 1")
    groups = tree.enlarged_first_level() if groups is None else groups
    prompts, shared = tree.order.astype(np.int64), tree.shared.astype(np.int64)
    work = tree.prompts.lengths[prompts] - shared + np.asarray(decode_tokens, dtype=np.float64)[prompts]
    # A prompt without a group is a group of its own.
    unit = np.where(groups[prompts] >= 0, groups[prompts], prompts + tree.num_nodes)
    _, unit = np.unique(unit, return_inverse=True)
    units = int(unit.max()) + 1 if len(unit) else 0
    unit_work = np.bincount(unit, weights=work, minlength=units).astype(np.float64)

    filling = _Filling(engines, float(work.sum()))
    fair_share = filling.fair_share
    engine_of = np.empty(len(prompts), dtype=np.int64)
    whole = []
    for number in np.argsort(-unit_work, kind="stable").tolist():
        if unit_work[number] > max(fair_share, filling.fair_share):
            places = np.flatnonzero(unit == number)
            # Prompts of other groups may stand between two of this one; then those have less in common.
            common = np.minimum.reduceat(shared[: places[-1] + 1], places[:-1] + 1) if len(places) > 1 else shared[:0]
            parts = filling.cut(work[places], common)
            if parts is not None:
                engine_of[places] = parts
                continue
        whole.append(number)
    engine_of_unit = np.zeros(units, dtype=np.int64)
    engine_of_unit[whole] = _longest_first(unit_work[whole], filling.load)
    is_whole = np.zeros(units, dtype=np.bool_)
    is_whole[whole] = True
    engine_of = np.where(is_whole[unit], engine_of_unit[unit], engine_of)
    return [np.sort(prompts[engine_of == engine]) for engine in range(engines)]


class _Filling:
    """Fills engines one after the other with groups that are too large for one.

    Attributes:
        load: work of each engine so far.
    """

    def __init__(self, engines: int, work: float) -> None:
        self.load = np.zeros(engines)
        self._current = 0
        self._left = work  # of all that no engine before the current one has

    @property
    def fair_share(self) -> float:
        """Work of each engine from the current one on, if all came out even; no end when only one is left."""
        engines = len(self.load) - self._current
        return self._left / engines if engines > 1 else float("inf")

    def cut(self, work: Float64Array, common: Int64Array) -> Int64Array | None:
        """Hands a group out; returns the engine of each of its prompts, or None (and does nothing) if it stays whole.

        Args:
            work: [prompts] of each, in the tree's order.
            common: [prompts - 1] tokens that each has in common with the one before.
        """
        engine_of = np.empty(len(work), dtype=np.int64)
        work, first = work.copy(), 0
        while first < len(work):
            end = self._end(work[first:], common[first:]) + first
            if first == 0 and end == len(work):
                return None
            engine_of[first:end] = self._current
            self.load[self._current] += work[first:end].sum()
            if end < len(work):
                work[end] += common[end - 1]  # computed once more
                self._left += float(common[end - 1])
            if end < len(work) or self.load[self._current] >= self.fair_share:
                self._left -= self.load[self._current]
                self._current += 1
            first = end
        return engine_of

    def _end(self, work: Float64Array, common: Int64Array) -> int:
        """Number of these prompts that the current engine gets."""
        others = len(self.load) - self._current - 1
        if others == 0:
            return len(work)
        here = self.load[self._current] + np.cumsum(work)
        # What both sides of a cut share is computed on every engine that gets something of the rest.
        rest, share = here[-1] - here[:-1], np.maximum(1.0, self._left - here[:-1]) / others
        elsewhere = share + common * np.clip(np.ceil(rest / share), 1, others) / others
        busiest = np.maximum(here[:-1], elsewhere)
        all_here = max(float(here[-1]), self.fair_share)
        if len(busiest) == 0 or float(busiest.min()) >= all_here:
            return len(work)
        return int(busiest.argmin()) + 1


def _longest_first(work: Float64Array, load: Float64Array) -> Int64Array:
    """An engine for each unit of work: the longest first, to the engine that has least then."""
    engine_of = np.zeros(len(work), dtype=np.int64)
    heap = [(float(value), engine) for engine, value in enumerate(load)]
    heapq.heapify(heap)
    for number in np.argsort(-work, kind="stable").tolist():
        least, engine = heap[0]
        engine_of[number] = engine
        heapq.heapreplace(heap, (least + float(work[number]), engine))
    return engine_of
