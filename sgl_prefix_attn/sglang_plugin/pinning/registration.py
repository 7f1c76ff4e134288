"""Whether pinning and retention are asked for, and the HTTP endpoint where they are."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from functools import partial
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import hooks, http_routes, versions
from sgl_prefix_attn.sglang_plugin.compat.pinning_targets import CREATE_TOKENIZED

logger = logging.getLogger(__name__)


def add_endpoints(settings: Settings, *, in_scheduler: bool) -> None:
    """Adds the HTTP endpoint in the server's process, if the settings ask for pins; checks hints there.

    A server that is a child process itself gets the hooks of a scheduler as well. Nothing calls them there.
    """
    if reads_hints(settings) and _makes_requests():
        from sgl_prefix_attn.sglang_plugin.pinning.hints import HintCompiler

        check = HintCompiler(partial(why_not_read, settings.retention)).after_create
        hooks.register((hooks.Hook(CREATE_TOKENIZED, check, "AFTER", "KV hints are not executed"),))
    if settings.pin_budget_percent and http_routes.serves_http(in_scheduler=in_scheduler):
        try:
            from sgl_prefix_attn.sglang_plugin.pinning.client import add_routes_to_server

            add_routes_to_server()
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP endpoint for pins; EnginePins works")


def is_asked_for(settings: Settings) -> bool:
    """Whether the settings ask for pins or retention. By hints there is retention where requests can have some."""
    return settings.pin_budget_percent != 0 or settings.retention == "reuse" or reads_hints(settings)


def why_not_read(retention: str, args: Any) -> str | None:
    """Why hints and sessions of requests are not read, by the settings and a server's arguments; None if they are."""
    if retention == "off":
        return "retention is off"
    if not versions.has_kv_hints():
        return "requests of this SGLang carry no kv_hints: those of 0.5.23 do"
    if versions.has_rust_server():
        return "SGLANG_RUST_SERVER: no plug-in checks them there"
    if getattr(args, "tokenizer_worker_num", 1) > 1:
        return "--tokenizer-worker-num above 1: no plug-in checks them there"
    if retention == "reuse":
        return None
    if getattr(args, "enable_hierarchical_cache", False) or getattr(args, "enable_lmcache", False):
        return "a cache of several tiers orders evictions of its own; retention=reuse overrules it"
    if getattr(args, "enable_session_radix_cache", False):
        return "--enable-session-radix-cache orders evictions by sessions itself"
    policy = getattr(args, "radix_eviction_policy", "lru")
    return None if policy == "lru" else f"--radix-eviction-policy {policy} is the operator's choice"


def reads_hints(settings: Settings) -> bool:
    """Whether hints and sessions of requests are read, if SGLang's requests have them."""
    return settings.retention != "off" and versions.has_kv_hints()


def _makes_requests() -> bool:
    """Whether this process makes schedulers' requests of clients' ones: that of the server, or of an engine."""
    modules = ("sglang.srt.entrypoints.http_server", "sglang.srt.entrypoints.engine")
    return multiprocessing.parent_process() is None or any(name in sys.modules for name in modules)
