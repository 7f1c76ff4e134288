"""The backend `prefixpack` of a server that never runs packed: SGLang's calls reach the stock backend at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState


class StockOnlyBackend(PrefixPackBackend):
    """Counts each step as a fallback. Layers, and the questions of each step, are members of the stock backend itself.

    They lie in the instance: a lookup through our classes takes some tenths of a microsecond each.

    Args:
        reason: why no step runs packed, a key of `fallback_reasons.EXPLANATIONS`.
    """

    needs_cpu_seq_lens = True  # in the instance, the stock backend's

    def __init__(self, runner: Any, stock: Any, state: PluginState, reason: str) -> None:
        super().__init__(runner, stock, state, reason)
        self.needs_cpu_seq_lens = bool(getattr(stock, "needs_cpu_seq_lens", True))
        for name in ("forward", "forward_decode", "forward_extend", "init_forward_metadata_in_graph"):
            method = getattr(stock, name, None)
            if method is not None:
                setattr(self, name, method)
        for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
            method = getattr(stock, name, None)
            if method is not None:
                setattr(self, name, counted(method, state, reason))

    def prepare_schedule_batch(self, batch: Any) -> None:
        """Nothing: no paths are read."""


def counted(method: Callable[..., None], state: PluginState, reason: str) -> Callable[..., None]:
    """A method that begins a step, which is counted as a fallback. Every step pays for this."""
    counters, fallbacks = state.counters, state.counters.fallbacks
    step_done = None if state.exporter is None else state.step_done

    def begin(forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        if reason in fallbacks:
            fallbacks[reason] += 1
        else:
            counters.fallback(reason)
        if step_done is not None:
            step_done()
        method(forward_batch, *args, **kwargs)

    return begin
