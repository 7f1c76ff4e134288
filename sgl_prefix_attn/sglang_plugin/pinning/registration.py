"""Registers pinning and retention where the settings ask for them; otherwise leaves SGLang alone."""

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
    """Hooks in scheduler processes, HTTP addresses in the server's process; nothing if neither is asked for.

    A server that is itself a child process looks like a scheduler (its module is loaded in both) and gets both. The
    hooks do nothing there, because nothing calls what they hook.
    """
    if in_scheduler:
        from sgl_prefix_attn.sglang_plugin.compat import hooks as compat_hooks

        compat_hooks.register(activate(settings))
    if settings.pin_budget_percent and (not in_scheduler or _SERVER_MODULE in sys.modules):
        # The server's module is imported early here, so only when its addresses are wanted.
        try:
            from sgl_prefix_attn.sglang_plugin.pinning.client import add_routes_to_server

            add_routes_to_server()
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server gets no addresses to pin prefixes; EnginePins still works")


def activate(settings: Settings) -> tuple[Hook, ...]:
    """Lets this process pin and retain as the settings ask; returns the hooks that it takes, in their order.

    May be called again: what has been pinned stays.
    """
    if settings.pin_budget_percent == 0 and settings.retention == "off":
        return ()
    from sgl_prefix_attn.sglang_plugin.pinning import hooks

    if not hooks.active():
        hooks.activate(hooks.PinningSettings.of(settings))
    return hooks.PINNING_HOOKS
