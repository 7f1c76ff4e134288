"""Gives SGLang's calls to the stock backend at once, for a backend of ours that never runs a step packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

_OF_LAYERS_AND_GRAPHS = ("forward", "forward_decode", "forward_extend", "init_forward_metadata_in_graph")
_BEGIN_STEPS = ("init_forward_metadata", "init_forward_metadata_out_graph")


def bypass(backend: Any, stock: Any, counters: Counters, reason: Reason, step_done: Callable[[], None] | None) -> None:
    """Makes the stock backend's methods those of `backend`. Each step is counted as a fallback.

    They lie in the instance: a lookup through our classes takes some tenths of a microsecond each.

    Args:
        reason: why no step runs packed.
        step_done: called once a step, for the metrics; None without metrics.
    """
    for name in _OF_LAYERS_AND_GRAPHS:
        method = getattr(stock, name, None)
        if method is not None:
            setattr(backend, name, method)
    for name in _BEGIN_STEPS:
        method = getattr(stock, name, None)
        if method is not None:
            setattr(backend, name, counted(method, counters, reason, step_done))


def counted(
    method: Callable[..., None], counters: Counters, reason: Reason, step_done: Callable[[], None] | None
) -> Callable[..., None]:
    """A method that begins a step, which is counted as a fallback. Every step pays for this."""
    fallbacks = counters.fallbacks

    def begin(forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        if reason in fallbacks:
            fallbacks[reason] += 1
        else:
            counters.fallback(reason)
        if step_done is not None:
            step_done()
        method(forward_batch, *args, **kwargs)

    return begin
