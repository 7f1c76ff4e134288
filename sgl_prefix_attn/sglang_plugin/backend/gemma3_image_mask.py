"""Attention masks of images in Gemma 3, where tokens of an image see each other.

Before a prefill, the model stores such a mask in the metadata of the current backend if that is a Triton backend. The
hook shows it our stock backend for that call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

ARCHITECTURE = "Gemma3ForConditionalGeneration"
# The one backend that reads such a mask.
BACKEND = "triton"


def around_prepare_attn_masks(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `Gemma3ForConditionalGeneration.prepare_attn_masks`."""
    from sglang.srt.model_executor.forward_context import forward_context, get_forward_context

    from sgl_prefix_attn.sglang_plugin.backend.stock_proxy import StockProxy

    context = get_forward_context()
    if not isinstance(context.attn_backend, StockProxy):
        return original(model, *args, **kwargs)
    with forward_context(dataclasses.replace(context, attn_backend=context.attn_backend.stock)):
        return original(model, *args, **kwargs)
