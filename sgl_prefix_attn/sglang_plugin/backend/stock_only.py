"""The backend `prefixpack` of a server that is known never to run packed when it starts."""

from __future__ import annotations

from typing import Any

from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason


class StockOnlyBackend(PrefixPackBackend):
    """Counts each step as a fallback. Layers, and the questions of each step, are members of the stock backend itself.

    Args:
        reason: why no step runs packed.
    """

    needs_cpu_seq_lens = True  # in the instance, the stock backend's

    def __init__(self, facts: ServerFacts, stock: Any, state: PluginState, reason: Reason) -> None:
        super().__init__(facts, stock, state, reason)
        self.needs_cpu_seq_lens = bool(getattr(stock, "needs_cpu_seq_lens", True))
        self.stop_packing(reason)
