"""The attention layers of one model: which of them run packed, and with which shape index."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.layer_support import (
    FP8,
    attention_layers,
    kv_scales,
    unsupported_buffers,
    unsupported_layer,
)
from sgl_prefix_attn.sglang_plugin.execution.pool_support import unsupported_pool, unsupported_slots
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts about a layer, found once. Holds the layer, so that its id() stays unique.

    Attributes:
        unsupported_reason: why the layer never runs packed, None if it does.
        shape_index: index of its shape's planner and plan; -1 for an unsupported layer.
        has_scales: whether its KV is stored divided by the layer's scales.
    """

    layer: Any
    unsupported_reason: Reason | None
    shape_index: int
    has_scales: bool


class LayerRegistry:
    """Examines each layer once: before the first step if the model shows its layers, else in the layer's first call.

    Args:
        executor: runs packed layers; allocates the buffers of each attention shape.
        counters: process totals; they include the planners of these layers.
        why_all_stock: the reason why no layer of this server ever runs packed, None if some may.
        knows_kv_scales: whether the stock backend stores fp8 KV divided by the layer's scales.

    Attributes:
        why_all_stock: as above; set too when the buffers of a layer do not fit the device's memory, and when none of
            the model's layers can run packed.
        scanned: whether the model's layers were examined.
        some_packed: whether a layer that can run packed is known.
        has_stock_layers: whether some layer runs on the stock backend in packed steps.
    """

    def __init__(
        self,
        facts: ServerFacts,
        executor: Executor,
        counters: Counters,
        why_all_stock: Reason | None,
        knows_kv_scales: bool,
    ) -> None:
        self.why_all_stock = why_all_stock
        self.scanned = False
        self.has_stock_layers = False
        self._model, self._pool = facts.model, facts.token_to_kv_pool
        self._executor = executor
        self._counters = counters
        self._knows_kv_scales = knows_kv_scales
        self._facts: dict[int, LayerFacts] = {}
        self.some_packed = False

    def unsupported_reasons(self) -> set[Reason | None]:
        """Reasons of the layers known so far; None stands for layers that run packed."""
        return {facts.unsupported_reason for facts in self._facts.values()}

    def summary(self) -> dict[str, Any]:
        """Layers known so far as JSON-able values: how many run packed, and how many do not, by reason."""
        stock = self._stock_layers()
        packed = len(self._facts) - sum(stock.values())
        return {"packed": packed, "stock": {reason.key: count for reason, count in stock.items()}}

    def _stock_layers(self) -> dict[Reason, int]:
        """How many of the layers known so far do not run packed, by reason."""
        found = [facts.unsupported_reason for facts in self._facts.values() if facts.unsupported_reason]
        return {reason: found.count(reason) for reason in sorted(set(found), key=str)}

    def scan_model(self) -> None:
        """Examines the layers that the model shows, so that their buffers exist before the first forward."""
        self.scanned = True
        try:
            for layer in attention_layers(self._model):
                self.facts(layer)
        finally:
            self._executor.seal()
        if not self._facts and self._executor.runs_in_graphs and self.why_all_stock is None:
            # Sealed without a shape: no layer that a call shows later gets buffers. Replayed graphs show none.
            self.why_all_stock = fallback_reasons.LATE_LAYER
        self.conclude()
        stock = self._stock_layers()
        if stock:
            logger.info(
                "prefixpack: %d of %d attention layers run packed; on the stock backend: %s",
                len(self._facts) - sum(stock.values()),
                len(self._facts),
                "; ".join(f"{count} ({reason.text})" for reason, count in stock.items()),
            )

    def conclude(self) -> None:
        """Sets `why_all_stock` if none of the layers known so far runs packed.

        They are known after a scan or, of a model that does not show its layers, after a packed step.
        """
        if not self.some_packed and self._facts and self.why_all_stock is None:
            self.why_all_stock = common_reason(self.unsupported_reasons())

    def facts(self, layer: Any) -> LayerFacts:
        """The facts about a layer, which may be unknown so far."""
        facts = self._facts.get(id(layer))
        if facts is None:
            facts = self._examine(layer)
            self._counters.count_planners(self._executor.planners)
            self._facts[id(layer)] = facts
            self.has_stock_layers |= facts.unsupported_reason is not None
            self.some_packed |= facts.unsupported_reason is None
        return facts

    def unsupported_reason(self, layer: Any) -> Reason | None:
        """The reason why a layer cannot run packed, None if it can. Allocates nothing."""
        reason = (
            self.why_all_stock
            or unsupported_pool(self._pool)
            or unsupported_slots(self._pool, layer)
            or unsupported_layer(layer)
        )
        if reason is not None:
            return reason
        k_cache = self._pool.get_key_buffer(layer.layer_id)
        v_cache = self._pool.get_value_buffer(layer.layer_id)
        reason = (
            unsupported_buffers(layer, k_cache, v_cache)
            or self._executor.unsupported_reason(layer, k_cache)
            or self._executor.unsupported_reason(layer, v_cache)
        )
        if reason is None and self._has_scales(k_cache) and kv_scales(layer) is None:
            reason = fallback_reasons.KV_SCALES
        return reason

    def judged(self) -> list[tuple[Any, Reason | None]]:
        """The layers that the model shows, each with the reason why it cannot run packed. Allocates nothing."""
        return [(layer, self.unsupported_reason(layer)) for layer in attention_layers(self._model)]

    def unsupported_model(self) -> Reason | None:
        """The reason why no layer runs packed, None if one may or if the model does not show its layers."""
        return common_reason({reason for _, reason in self.judged()})

    def _has_scales(self, k_cache: torch.Tensor) -> bool:
        return self._knows_kv_scales and k_cache.dtype is FP8

    def _examine(self, layer: Any) -> LayerFacts:
        reason = self.unsupported_reason(layer)
        if reason is not None:
            return LayerFacts(layer, reason, shape_index=-1, has_scales=False)
        k_cache = self._pool.get_key_buffer(layer.layer_id)
        try:
            shape_index = self._executor.shape_index(layer, k_cache)
        except torch.OutOfMemoryError:
            self.why_all_stock = fallback_reasons.NO_MEMORY
            logger.exception("prefixpack: no memory for the buffers of packed steps")
            return LayerFacts(layer, fallback_reasons.NO_MEMORY, shape_index=-1, has_scales=False)
        return LayerFacts(layer, None, shape_index, has_scales=self._has_scales(k_cache))


def common_reason(found: set[Reason | None]) -> Reason | None:
    """The reason why no layer of a model runs packed, by those of its layers; None if one does or there is none."""
    if not found or None in found:
        return None
    return min(filter(None, found), key=lambda reason: (reason.by_design, reason.key))
