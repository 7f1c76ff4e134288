"""Builds our backends for a model runner: the one behind the name `prefixpack`, and wrappers of stock backends."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import eligibility, gemma3_image_mask, plugin_state
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState
from sgl_prefix_attn.sglang_plugin.backend.stock_only import StockOnly
from sgl_prefix_attn.sglang_plugin.backend.stock_proxy import StockProxy
from sgl_prefix_attn.sglang_plugin.compat import hooks, versions
from sgl_prefix_attn.sglang_plugin.compat.cpu_fallbacks import CpuFallbacks
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import build_stock, set_draft_backend, stock_name
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.prefix import one_token
from sgl_prefix_attn.sglang_plugin.scheduling import shared_prefill
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
from sgl_prefix_attn.sglang_plugin.scheduling.shared_prefill import SharedPrefill
from sgl_prefix_attn.sglang_plugin.startup import hook_table
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

logger = logging.getLogger(__name__)


def create_backend(runner: Any, settings: Settings) -> StockProxy:
    """The factory behind the name `prefixpack`.

    Raises:
        ValueError: an MLA model; a stock backend that cannot work here; or a draft model whose backend cannot be
            chosen.
    """
    facts = ServerFacts.of(runner)
    if facts.use_mla_backend:
        raise ValueError(
            "attention backend 'prefixpack' does not support models with multi-head latent attention (MLA); start "
            "SGLang with another --attention-backend for this model"
        )
    name = stock_name(facts, settings.stock_backend)
    if facts.is_draft_worker:
        set_draft_backend(runner, name)
    executor = eligibility.out_of_graphs(eligibility.executor_at_start(facts, settings, name))
    state = plugin_state.of_process(settings, versions.installed_version())
    state.serve(facts)
    missing = connect(state, facts, settings, name, packs=not isinstance(executor, Reason))
    log_missing(missing, state)
    stock = build_stock(runner, name)
    if set(missing) & set(hook_table.handover_hooks(state.handover_hooks)):
        executor = fallback_reasons.HOOKS_MISSING
    if isinstance(executor, Reason):
        level = logging.INFO if executor in _EXPECTED else logging.WARNING
        logger.log(level, "prefixpack: all steps of this backend run on the stock backend: %s", executor.text)
        return StockOnly(facts, stock, state, executor)
    backend = PrefixPackBackend(facts, stock, state, executor)
    hook_verify_steps(backend, state)
    return backend


def wrap_backend(runner: Any, name: str, stock: Any, settings: Settings) -> Any:
    """A stock backend wrapped by ours, or the stock backend itself where we can be of no use or do harm. Never raises.

    What refuses, and why, is logged once. A refused server has no hook and no state of ours, but for
    those of scheduling that the settings ask for (`entry.asks_for_scheduling`).

    Args:
        runner: SGLang's ModelRunner.
        name: the stock backend's name, one of `settings.WRAPPABLE`.
        stock: the stock backend, as SGLang built it.
        settings: settings in force.
    """
    error = None
    try:
        facts = ServerFacts.of(runner)
        reason = eligibility.wrap_refusal(facts, name, stock, settings)
        if reason is None:
            state = plugin_state.of_process(settings, versions.installed_version())
            state.serve(facts)
            missing = connect(state, facts, settings, name, wraps=True)
            unhooked = set(missing) & set(hook_table.handover_hooks(state.handover_hooks))
            executor = fallback_reasons.HOOKS_MISSING if unhooked else eligibility.make_executor(facts, settings, name)
            if not isinstance(executor, Reason):
                backend = PrefixPackBackend(facts, stock, state, executor, wraps=name)
                hook_verify_steps(backend, state)
                logger.info("prefixpack: %s runs wrapped: its steps are packed where requests share a prefix", name)
                if name == trtllm_mha.NAME:
                    logger.warning("prefixpack: %s", trtllm_mha.TESTED)
                return backend
            reason = executor
    except Exception as raised:  # the one guard of wrap mode: the server starts as it would without us
        reason, error = fallback_reasons.FAILED, raised
    _deactivate_hooks()
    _log_refusal(name, reason, error)
    return stock


def _deactivate_hooks() -> None:
    """As `plugin_state.deactivate_hooks`; then no request waits for a prefill either."""
    plugin_state.deactivate_hooks()
    state = plugin_state.active()
    if state is not None and state.handover is None:
        state.own(SharedPrefill, state.counters).active = False


_logged: set[tuple[str, Reason]] = set()
# Refusals of a backend beside one that packs.
_EXPECTED = frozenset(
    {
        fallback_reasons.DRAFT_WORKER,
        fallback_reasons.COMPUTE_BOUND,
        fallback_reasons.DISABLED,
        fallback_reasons.PREFILL_ONLY,
    }
)


def _log_refusal(name: str, reason: Reason, error: Exception | None) -> None:
    """Logs why a stock backend is not wrapped, once for each reason."""
    if (name, reason) not in _logged:
        _logged.add((name, reason))
        level = logging.INFO if reason in _EXPECTED else logging.WARNING
        logger.log(level, "prefixpack: %s is not wrapped, and runs as it is: %s", name, reason.text, exc_info=error)


def connect(
    state: PluginState, facts: ServerFacts, settings: Settings, name: str, *, wraps: bool = False, packs: bool = True
) -> list[hooks.Hook]:
    """Makes this process hand request paths to our backends.

    Args:
        name: the stock backend's name.
        packs: whether any step of this backend may run packed. Others need no hooks on their steps.
        wraps: whether SGLang knows the backend by that name; what it decides by the name is right then.

    Returns:
        The hooks that could not be applied.
    """
    assert state.handover is not None, "PluginState.serve comes first"
    has_effect = functools.partial(_has_effect, state, facts)
    wanted = hook_table.OTHER_HOOKS
    wanted += hook_table.handover_hooks(state.handover_hooks) if packs else ()
    if not facts.is_draft_worker:  # the state describes the target model, whose backend comes first
        state.stock_backend = name
        if packs and state.settings.one_token_steps and has_effect("one_token_steps", one_token.why_none_decodes):
            state.handover.run_one_token_steps()
        shares = state.settings.shared_prefill if packs else state.settings.shared_prefill is True
        if shares and has_effect("shared_prefill", shared_prefill.why_none_waits):
            prefills = state.own(SharedPrefill, state.counters)
            prefills.active = True
            state.own(Admission, state.counters.failures).enlist(prefills)
    if facts.is_cpu and not wraps:
        fallbacks = state.own(CpuFallbacks)
        fallbacks.has_cpu_backend = True
        wanted += hook_table.cpu_hooks(fallbacks)
    elif packs and not facts.is_cpu and settings.policy.fixed is None:
        wanted += hook_table.GRAPH_HOOKS
    if not wraps and masks_images(facts, name, settings):
        wanted += hook_table.IMAGE_MASK_HOOKS
    wanted += hook_table.scheduling_hooks(settings, state)
    missing = hooks.ensure_applied(wanted)
    if versions.ask_for_readable_tree_core(os.environ):
        logger.warning(
            "prefixpack: the native radix tree core of SGLang %s cannot tell which requests share a prefix; using its "
            "Python core (%s=python)",
            state.sglang_version,
            versions.TREE_CORE_VARIABLE,
        )
    logger.info("prefixpack: stock backend %s, SGLang %s", name, state.sglang_version)
    return missing


def hook_verify_steps(backend: PrefixPackBackend, state: PluginState) -> None:
    """Makes paths reach verify steps that run in graphs, where the backend packs such steps."""
    if backend.checks_drafts_in_graphs:
        log_missing(hooks.ensure_applied(hook_table.verify_hooks(state.handover_hooks)), state)


def log_missing(missing: list[hooks.Hook], state: PluginState) -> None:
    """Logs and records the consequence of each hook that could not be applied."""
    for hook in missing:
        path, version = hook.target.path, state.sglang_version
        logger.error("prefixpack: could not hook %s in SGLang %s, so %s", path, version, hook.consequence)
        state.counters.failures.switch_off(path, f"the hook is missing: {hook.consequence}")


def _has_effect(
    state: PluginState, facts: ServerFacts, setting: str, why_none: Callable[[ServerFacts], str | None]
) -> bool:
    """Whether a setting that is on has an effect on this server; logs why not, as a warning if it is not "auto"."""
    why_not = why_none(facts)
    if why_not is not None:
        state.counters.failures.switch_off(setting, why_not)
        level = logging.WARNING if getattr(state.settings, setting) is True else logging.INFO
        logger.log(level, "prefixpack: %s has no effect on this server: %s", setting, why_not)
    return why_not is None


def masks_images(facts: ServerFacts, name: str, settings: Settings) -> bool:
    """Whether images of the model have attention masks of their own that the stock backend reads."""
    if name != gemma3_image_mask.BACKEND or gemma3_image_mask.ARCHITECTURE not in facts.architectures:
        return False
    if settings.pack_extend is True:
        logger.warning(
            "prefixpack: with pack_extend, tokens of an image do not see those that come after them; set it to 'auto' "
            "if requests bring images"
        )
        return False
    return True
