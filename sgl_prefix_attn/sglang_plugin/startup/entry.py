"""Entry point of the SGLang plug-in (group `sglang.srt.plugins`): SGLang calls `register` in each of its processes.

`register` must be quick and must never take the server down. In the main process it only adds the name `prefixpack`.
Hooks are registered in scheduler processes only, because their targets import half of SGLang. Most come with a backend
of ours (`factory.connect`). On a GPU a server that uses another backend has no hooks unless the settings ask for them,
and loads next to nothing of this package; where requests carry KV hints, it has those that wait for some. On a CPU it
has those for our name, which do nothing.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from typing import Any

from sgl_prefix_attn.settings import Settings, SettingsError, load_settings, misnamed_variables
from sgl_prefix_attn.sglang_plugin.compat import versions

logger = logging.getLogger(__name__)

NAME = "prefixpack"
_ENGINE_MODULE = "sglang.srt.entrypoints.engine"
_RAY_ENGINE_MODULE = "sglang.srt.ray.engine"


def register() -> None:
    """Registers the attention backend, or logs why it is not available."""
    if not in_scheduler_process():  # of which a server has many, with the same variables
        for warning in misnamed_variables():
            logger.warning("prefixpack: %s", warning)
    try:
        settings = load_settings()
        version = versions.installed_version()
        versions.check_supported(version, allow_untested=settings.allow_untested_sglang)
    except (SettingsError, versions.UnsupportedSglangError) as error:
        logger.error("prefixpack: attention backend %r is not available: %s", NAME, error)
        return
    register_name(settings)
    if settings.wrap:
        register_wrapping(settings)
    if in_scheduler_process() and (asks_for_scheduling(settings) or may_need_cpu_hooks(settings)):
        register_hooks(settings, version)
    if "--use-ray" in sys.argv or _RAY_ENGINE_MODULE in sys.modules:
        register_ray_actors()
    register_endpoints(settings)


def register_name(settings: Settings) -> None:
    """Adds the name to the command line options and to the registry of backends."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    # --attention-backend, --prefill-attention-backend and --decode-attention-backend share this list.
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    if NAME in ATTENTION_BACKENDS:
        return

    @register_attention_backend(NAME)
    def create_prefixpack_backend(runner: Any) -> Any:
        from sgl_prefix_attn.sglang_plugin.startup.factory import create_backend

        return create_backend(runner, settings)


def register_wrapping(settings: Settings) -> None:
    """Wraps stock backends. Hooks of packed steps come with a backend that can run them: other servers have none."""
    from sgl_prefix_attn.sglang_plugin.startup import wrapping

    wrapping.install(settings)
    if not in_scheduler_process() or _ENGINE_MODULE in sys.modules:
        wrapping.hook_launchers()


def asks_for_scheduling(settings: Settings) -> bool:
    """Whether the settings ask for what needs no backend of ours: pins, retention or group scheduling."""
    from sgl_prefix_attn.sglang_plugin.pinning import registration

    return settings.group_scheduling or registration.is_asked_for(settings)


def may_need_cpu_hooks(settings: Settings) -> bool:
    """Whether a backend of ours, under its own name, would need SGLang's decisions by that name corrected for a CPU."""
    import torch

    return not settings.wrap and not torch.cuda.is_available()


def register_hooks(settings: Settings, version: str) -> None:
    """Adds to SGLang's registry the hooks that cannot wait for a backend: of scheduling, and for the name on a CPU.

    The latter do nothing until a prefixpack backend is built in this process.
    """
    from sgl_prefix_attn.sglang_plugin.backend import plugin_state
    from sgl_prefix_attn.sglang_plugin.compat import hooks
    from sgl_prefix_attn.sglang_plugin.compat.cpu_fallbacks import CpuFallbacks
    from sgl_prefix_attn.sglang_plugin.startup import hook_table

    state = plugin_state.of_process(settings, version)
    wanted = hook_table.scheduling_hooks(settings, state)
    if asks_for_scheduling(settings):
        wanted += hook_table.SCHEDULING_STATE_HOOKS
    if may_need_cpu_hooks(settings):
        wanted += hook_table.cpu_hooks(state.own(CpuFallbacks))
    hooks.register(wanted)


def register_ray_actors() -> None:
    """Makes schedulers that are Ray actors load plug-ins. For the process that makes the actors."""
    from sgl_prefix_attn.sglang_plugin.compat import hooks, launchers, wrap_targets

    hook = hooks.Hook(
        wrap_targets.CREATE_RAY_ACTOR,
        launchers.around_create_scheduler_actor,
        "AROUND",
        "schedulers that are Ray actors run without prefixpack",
    )
    hooks.register((hook,))


def register_endpoints(settings: Settings) -> None:
    """Adds the HTTP endpoints of pinning, live tests, recordings and fingerprints, if the settings ask for them."""
    from sgl_prefix_attn.sglang_plugin.pinning import registration

    registration.add_endpoints(settings, in_scheduler=in_scheduler_process())
    if not settings.live_tests and settings.fingerprint_key is None:
        return
    from sgl_prefix_attn.sglang_plugin.backend import live_endpoints, running_prompts

    live_endpoints.add_endpoints(settings, in_scheduler=in_scheduler_process())
    running_prompts.add_endpoint(settings, in_scheduler=in_scheduler_process())


def in_scheduler_process() -> bool:
    """Whether SGLang spawned this process to run a scheduler. Also true of a server that is a child process itself.

    With a launcher that runs the scheduler in another way, the backend's factory applies the missing hooks.
    """
    return multiprocessing.parent_process() is not None and "sglang.srt.managers.scheduler" in sys.modules
