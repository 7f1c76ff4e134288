"""Makes the backend behind the name `prefixpack` for a model runner."""

from __future__ import annotations

import logging
import os
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin import cpu_traps, hooks, pinning_registration, versions
from sgl_prefix_attn.sglang_plugin import runtime as runtime_module
from sgl_prefix_attn.sglang_plugin.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.handover import Kind
from sgl_prefix_attn.sglang_plugin.inner import build_inner, inner_name, is_cpu

logger = logging.getLogger(__name__)


def create_backend(runner: Any, settings: Settings) -> PrefixPackBackend:
    """The factory behind the name `prefixpack`.

    Raises:
        ValueError: an MLA model, an inner backend that cannot work here, `handover=patch` without the patch, or a
            `route_profile` that is none.
    """
    version = versions.installed_version()
    if runner.use_mla_backend:
        raise ValueError(
            "attention backend 'prefixpack' does not support models with multi-head latent attention (MLA); start "
            "SGLang with another --attention-backend for this model"
        )
    name = inner_name(runner, settings.inner_backend)
    kind = handover_kind(settings, version)
    runtime = runtime_module.start(settings, version, kind, runner)
    runtime.inner_backend = name
    wanted = hooks.OTHER_HOOKS + (hooks.HANDOVER_HOOKS if kind == "hooks" else ())
    if is_cpu(runner):
        cpu_traps.note_cpu_backend()
        wanted += hooks.cpu_hooks()
    elif settings.route == "auto":
        wanted += hooks.GRAPH_HOOKS
    wanted += pinning_registration.activate(settings)
    for hook in hooks.ensure_applied(wanted):
        logger.error("prefixpack: could not hook %s in SGLang %s, so %s", hook.target.path, version, hook.consequence)
    if versions.ask_for_readable_tree_core(os.environ):
        logger.warning(
            "prefixpack: the native radix tree core of SGLang %s cannot tell which requests share a prefix; using its "
            "Python core (%s=python)",
            version,
            versions.TREE_CORE_VARIABLE,
        )
    backend = PrefixPackBackend(runner, build_inner(runner, name), runtime)
    logger.info("prefixpack: inner backend %s, paths through %s, SGLang %s", name, kind, version)
    return backend


def handover_kind(settings: Settings, version: str) -> Kind:
    """How paths are handed over under these settings with the installed SGLang."""
    patched = versions.has_native_seam()
    if settings.handover == "patch" and not patched:
        raise ValueError(
            f"handover='patch', but the installed SGLang {version} does not carry the patch; apply it with "
            "`python -m sgl_prefix_attn patch apply`, or set handover to 'auto' or 'hooks'"
        )
    return "patch" if patched and settings.handover != "hooks" else "hooks"
