"""Whether pinning and retention are asked for, and the HTTP endpoint where they are."""

from __future__ import annotations

import logging

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import http_routes

logger = logging.getLogger(__name__)


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
