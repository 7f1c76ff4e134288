"""Registers pinning and retention where the settings ask for them; otherwise nothing is hooked."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import http_routes
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures

if TYPE_CHECKING:
    from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook

logger = logging.getLogger(__name__)

_Owned = TypeVar("_Owned")


class Owner(Protocol):
    """What makes and keeps the one object of a type in this process, as the plug-in state does."""

    def own(self, kind: type[_Owned], *arguments: Any) -> _Owned: ...


def add_endpoints(settings: Settings, *, in_scheduler: bool) -> None:
    """Adds the HTTP endpoint in the server's process, if the settings ask for pins.

    A server that is a child process itself gets the hooks of a scheduler as well. Nothing calls them there.
    """
    if settings.pin_budget_percent and http_routes.serves_http(in_scheduler=in_scheduler):
        try:
            from sgl_prefix_attn.sglang_plugin.pinning.client import add_routes_to_server

            add_routes_to_server()
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP endpoint for pins; EnginePins works")


def is_asked_for(settings: Settings) -> bool:
    """Whether the settings ask for pins or retention."""
    return settings.pin_budget_percent != 0 or settings.retention != "off"


def hooks_for(settings: Settings, owner: Owner) -> tuple[Hook, ...]:
    """The hooks that the settings ask for, in their order; `owner` keeps their state."""
    if not is_asked_for(settings):
        return ()
    from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningHooks
    from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings

    return owner.own(PinningHooks, PinningSettings.of(settings), owner.own(Failures)).table()
