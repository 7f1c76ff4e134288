"""The backend `prefixpack` of a server that never runs packed: SGLang's calls reach the stock backend at once."""

from __future__ import annotations

from typing import Any

from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState


class StockOnlyBackend(PrefixPackBackend):
    """Counts each step as a fallback; layers are calls of the stock backend's own methods.

    Args:
        reason: why no step runs packed, a key of `fallback_reasons.EXPLANATIONS`.
    """

    def __init__(self, runner: Any, stock: Any, state: PluginState, reason: str) -> None:
        super().__init__(runner, stock, state, reason)
        self._reason = reason
        for name in ("forward", "forward_decode", "forward_extend"):
            method = getattr(stock, name, None)
            if method is not None:
                setattr(self, name, method)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """The stock backend's."""
        return bool(getattr(self.stock, "needs_cpu_seq_lens", True))

    def prepare_schedule_batch(self, batch: Any) -> None:
        """Nothing: no paths are read."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._count()
        self.stock.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._count()
        self.stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.stock.init_forward_metadata_in_graph(forward_batch)

    def _count(self) -> None:
        """Every step pays for this on the scheduler's thread."""
        fallbacks, reason = self._counters.fallbacks, self._reason
        if reason in fallbacks:
            fallbacks[reason] += 1
        else:
            self._counters.fallback(reason)
        if self._state.exporter is not None:
            self._state.step_done()
