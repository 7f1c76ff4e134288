"""The backend `prefixpack` of a server that is known never to run packed when it starts."""

from __future__ import annotations

from typing import Any

from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState
from sgl_prefix_attn.sglang_plugin.backend.stock_proxy import StockProxy
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason


class StockOnly(StockProxy):
    """Packs nothing. SGLang calls the stock backend's methods for layers, and counted ones at the begin of steps.

    Args:
        reason: why no step runs packed.
    """

    def __init__(self, facts: ServerFacts, stock: Any, state: PluginState, reason: Reason) -> None:
        super().__init__(facts, stock, state)
        state.refuse(self, reason)
        self.pass_through(reason)
