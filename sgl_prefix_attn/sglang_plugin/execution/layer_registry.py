"""What is known of the attention layers of one model runner: which of them can run packed, and with which plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.layer_support import (
    FP8,
    attention_layers,
    kv_scales,
    unsupported_buffers,
    unsupported_layer,
    unsupported_pool,
)
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerFacts:
    """What is looked up once per layer; holds the layer, so that its id() stays its own.

    Attributes:
        obstacle: why the layer never runs packed, None if it does.
        slot: index of its shape's planner and plan; -1 with an obstacle.
        has_scales: whether its KV is stored divided by the layer's scales.
    """

    layer: Any
    obstacle: str | None
    slot: int
    has_scales: bool


class KnownLayers:
    """Looks at each layer once, before its first step where the model says which layers there are.

    Args:
        runner: SGLang's ModelRunner.
        executor: what runs packed layers; gets a slot for each attention shape.
        counters: told of the planners that this makes.
        never: why no layer of this runner ever runs packed, None if some may.
        knows_kv_scales: whether the stock backend stores fp8 KV divided by the layer's scales.

    Attributes:
        never: as above; running out of memory for a layer's buffers sets it, too.
        looked: whether the model's layers were looked at.
        any_falls_back: whether some layer is known to run on the stock backend in packed steps.
    """

    def __init__(
        self, runner: Any, executor: Executor, counters: Counters, never: str | None, knows_kv_scales: bool
    ) -> None:
        self.never = never
        self.looked = False
        self.any_falls_back = False
        self._runner = runner
        self._pool = runner.token_to_kv_pool
        self._executor = executor
        self._counters = counters
        self._knows_kv_scales = knows_kv_scales
        self._facts: dict[int, LayerFacts] = {}

    def obstacles(self) -> set[str | None]:
        """Of the layers known so far; None stands for those that run packed."""
        return {facts.obstacle for facts in self._facts.values()}

    def look_at_model(self) -> None:
        """Learns from the model, once, which layers there are, so that planning happens before the forward."""
        self.looked = True
        for layer in attention_layers(getattr(self._runner, "model", None)):
            self.facts(layer)
        self._executor.seal()

    def facts(self, layer: Any) -> LayerFacts:
        """Of a layer that may not have been seen before."""
        facts = self._facts.get(id(layer))
        if facts is None:
            facts = self._look_at(layer)
            self._counters.count_planners(self._executor.planners)
            self._facts[id(layer)] = facts
            self.any_falls_back |= facts.obstacle is not None
        return facts

    def _look_at(self, layer: Any) -> LayerFacts:
        obstacle = self.never or unsupported_layer(layer) or unsupported_pool(self._pool)
        if obstacle is not None:
            return LayerFacts(layer, obstacle, -1, False)
        k_cache = self._pool.get_key_buffer(layer.layer_id)
        v_cache = self._pool.get_value_buffer(layer.layer_id)
        obstacle = (
            unsupported_buffers(layer, k_cache, v_cache)
            or self._executor.obstacle(layer, k_cache)
            or self._executor.obstacle(layer, v_cache)
        )
        has_scales = self._knows_kv_scales and obstacle is None and k_cache.dtype is FP8
        if has_scales and kv_scales(layer) is None:
            obstacle = fallback_reasons.KV_SCALES
        slot = -1
        if obstacle is None:
            try:
                slot = self._executor.slot(layer, k_cache)
            except torch.OutOfMemoryError:
                obstacle = self.never = fallback_reasons.NO_MEMORY
                logger.exception("prefixpack: no memory for the buffers of packed steps")
        return LayerFacts(layer, obstacle, slot, has_scales)
