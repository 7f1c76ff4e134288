"""Registers pinning and retention where the settings ask for them; otherwise leaves SGLang alone."""

from __future__ import annotations

import logging
import multiprocessing

from sgl_prefix_attn.settings import Settings

logger = logging.getLogger(__name__)


def register(settings: Settings, *, in_scheduler: bool) -> None:
    """Hooks in scheduler processes, HTTP addresses in the server's process; nothing if neither is asked for."""
    if settings.pin_budget_percent == 0 and settings.retention == "off":
        return
    if in_scheduler:
        from sgl_prefix_attn.sglang_plugin import hooks, pinning_hooks

        pinning_hooks.activate(pinning_hooks.PinningSettings.of(settings))
        hooks.register(pinning_hooks.PINNING_HOOKS)
    elif settings.pin_budget_percent and multiprocessing.parent_process() is None:
        # The server's module is imported early here, so only when its addresses are wanted.
        try:
            from sgl_prefix_attn.sglang_plugin.pinning_client import add_routes_to_server

            add_routes_to_server()
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server gets no addresses to pin prefixes; EnginePins still works")
