"""Shared-prefix attention: `--attention-backend prefixpack` of SGLang, and the planner and kernels on their own.

The names below are imported on first use, so that importing the package costs nothing and needs neither torch nor
SGLang.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_prefix_attn.core.attention import packed_attention
    from sgl_prefix_attn.core.forest import PrefixForest
    from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, PlanError, Planner

__version__ = "0.1.0"
__all__ = ["DeviceModel", "ModelShape", "PlanError", "Planner", "PrefixForest", "__version__", "packed_attention"]

_MODULES = {
    "DeviceModel": "sgl_prefix_attn.core.planner",
    "ModelShape": "sgl_prefix_attn.core.planner",
    "PlanError": "sgl_prefix_attn.core.planner",
    "Planner": "sgl_prefix_attn.core.planner",
    "PrefixForest": "sgl_prefix_attn.core.forest",
    "packed_attention": "sgl_prefix_attn.core.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
