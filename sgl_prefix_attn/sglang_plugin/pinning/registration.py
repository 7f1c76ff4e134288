"""Registers pinning and retention where the settings ask for them; otherwise nothing is hooked."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from sgl_prefix_attn.settings import Settings

if TYPE_CHECKING:
    from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook

logger = logging.getLogger(__name__)

_SERVER_MODULE = "sglang.srt.entrypoints.http_server"


def register(settings: Settings, *, in_scheduler: bool) -> None:
    """Registers hooks in scheduler processes and HTTP routes in the server's process, if the settings ask for them.

    A server that is a child process itself has the scheduler's module loaded, so it gets both. Nothing calls the hooks
    there.
    """
    if in_scheduler:
        from sgl_prefix_attn.sglang_plugin.compat import hooks as compat_hooks

        compat_hooks.register(activate(settings))
    if settings.pin_budget_percent and (not in_scheduler or _SERVER_MODULE in sys.modules):
        # This imports the server's module early, so only where its routes are needed.
        try:
            from sgl_prefix_attn.sglang_plugin.pinning.client import add_routes_to_server

            add_routes_to_server()
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP routes for pins; EnginePins works")


def activate(settings: Settings) -> tuple[Hook, ...]:
    """Activates pinning in this process if the settings ask for it; returns its hooks, in their order.

    A second call keeps the state and its pins.
    """
    if settings.pin_budget_percent == 0 and settings.retention == "off":
        return ()
    from sgl_prefix_attn.sglang_plugin.pinning import hooks, state

    if state.current() is None:
        state.activate(state.PinningSettings.of(settings))
    return hooks.pinning_hooks()
