"""The stock backend that serves whatever prefixpack does not."""

from __future__ import annotations

import logging
from typing import Any

from sgl_prefix_attn.settings import accepted_values
from sgl_prefix_attn.sglang_plugin import versions

logger = logging.getLogger(__name__)

CPU_DEFAULT = "torch_native"
# Backends of CUDA builds that can be wrapped, and the one to take when SGLang would choose another.
CUDA_CHOICES = ("flashinfer", "fa3", "triton")
CUDA_DEFAULT = "triton"
# Those that neither divide by a layer's KV scales when they store nor multiply by them when they read.
_WITHOUT_KV_SCALES = frozenset({"torch_native", "flex_attention"})


def inner_name(runner: Any, setting: str) -> str:
    """The inner backend's name for a model runner and the setting `inner_backend`.

    Raises:
        ValueError: a setting that cannot work on the runner's device.
    """
    on_cpu = is_cpu(runner)
    if setting != "auto":
        if on_cpu and setting != CPU_DEFAULT:
            raise ValueError(
                f"inner_backend={setting!r} needs a GPU, but SGLang runs on the CPU here; use {CPU_DEFAULT!r} or "
                f"'auto' (accepted: {accepted_values('inner_backend')})"
            )
        return setting
    if on_cpu:
        return CPU_DEFAULT
    chosen = versions.default_attention_backend(runner)
    if chosen in CUDA_CHOICES:
        return str(chosen)
    logger.warning("prefixpack: SGLang would choose %r here, which cannot be wrapped; using %r", chosen, CUDA_DEFAULT)
    return CUDA_DEFAULT


def build_inner(runner: Any, name: str) -> Any:
    """Builds a stock backend through SGLang's own registry."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    try:
        factory = ATTENTION_BACKENDS[name]
    except KeyError:
        raise ValueError(
            f"inner_backend={name!r}: SGLang {versions.installed_version()} has no such attention backend; it has "
            f"{', '.join(sorted(ATTENTION_BACKENDS))}"
        ) from None
    return factory(runner)


def knows_kv_scales(name: str) -> bool:
    """Whether an inner backend stores fp8 KV divided by the layers' scales, as it will find and leave it."""
    return name not in _WITHOUT_KV_SCALES


def is_cpu(runner: Any) -> bool:
    return str(runner.device).split(":")[0] == "cpu"
