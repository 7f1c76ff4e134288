"""Wrap mode: SGLang's registry gives stock backends wrapped by ours, under their own names.

The user keeps the name that he has, or none. All that SGLang decides by the name stays right.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import hooks, launchers, wrap_targets
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import STOCK_FACTORY

logger = logging.getLogger(__name__)

LAUNCH_HOOKS = (
    hooks.Hook(
        wrap_targets.LAUNCH_SCHEDULERS,
        launchers.around_launch_scheduler_processes,
        "AROUND",
        "schedulers with an entry function of the launcher's own run without prefixpack",
    ),
)


def install(settings: Settings) -> None:
    """Replaces the registry's factories of the backends that `settings.wrap` names.

    Works in any process: only one that builds a model runner calls a factory. Backends that this SGLang lacks are left
    out.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name in settings.wrap:
        factory = ATTENTION_BACKENDS.get(name)
        if factory is not None and not hasattr(factory, STOCK_FACTORY):
            ATTENTION_BACKENDS[name] = _wrapping(name, factory, settings)


def _wrapping(name: str, stock_factory: Callable[[Any], Any], settings: Settings) -> Callable[[Any], Any]:
    """A factory for SGLang's registry. It raises what SGLang's own factory raises, and nothing of ours."""

    @functools.wraps(stock_factory)
    def create(runner: Any) -> Any:
        stock = stock_factory(runner)
        try:
            from sgl_prefix_attn.sglang_plugin.startup.factory import wrap_backend
        except Exception:  # an installation that lost its native module, for example
            logger.exception("prefixpack: %s is not wrapped, and runs as it is: the package cannot be imported", name)
            return stock
        return wrap_backend(runner, name, stock, settings)

    setattr(create, STOCK_FACTORY, stock_factory)
    return create


def hook_launchers() -> None:
    """Makes launchers with a scheduler function of their own load plug-ins. For processes that launch schedulers."""
    hooks.register(LAUNCH_HOOKS)
