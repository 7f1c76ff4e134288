"""Models whose images have an attention mask of their own, and SGLang's look at which backend will read it.

Gemma 3 lets the tokens of an image see each other. Before a prefill it makes that mask, if the backend it finds is the
Triton one, and leaves it in that backend's metadata. Here it finds ours, so for that moment the stock one is shown.
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

    from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend

    context = get_forward_context()
    if not isinstance(context.attn_backend, PrefixPackBackend):
        return original(model, *args, **kwargs)
    with forward_context(dataclasses.replace(context, attn_backend=context.attn_backend.stock)):
        return original(model, *args, **kwargs)
