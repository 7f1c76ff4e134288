"""Tables of the hooks on SGLang: target, function, kind, and the consequence if the hook is missing."""

from __future__ import annotations

import importlib.util

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import gemma3_image_mask, memory_release, server_info
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState
from sgl_prefix_attn.sglang_plugin.compat import targets
from sgl_prefix_attn.sglang_plugin.compat.cpu_fallbacks import CpuFallbacks
from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook
from sgl_prefix_attn.sglang_plugin.dispatch import graph_variants
from sgl_prefix_attn.sglang_plugin.pinning import registration
from sgl_prefix_attn.sglang_plugin.prefix.handover import HandoverHooks
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import GroupScheduler
from sgl_prefix_attn.sglang_plugin.scheduling.step_sizes import StepSizes

OTHER_HOOKS: tuple[Hook, ...] = (
    Hook(targets.INTERNAL_STATE, server_info.after_get_internal_state, "AFTER", "GET /server_info lacks our state"),
    Hook(
        targets.RESUME_MEMORY,
        memory_release.after_resume_memory_occupation,
        "AFTER",
        "after a release of the memory of CUDA graphs, packed steps may read lost plans",
    ),
    Hook(targets.ON_IDLE, server_info.after_on_idle, "AFTER", "metrics lag by some steps while the server is idle"),
)
# For servers whose settings ask for scheduling. They may have no backend of ours.
SCHEDULING_STATE_HOOKS: tuple[Hook, ...] = (
    Hook(targets.INTERNAL_STATE, server_info.tell_without_backend, "AFTER", "GET /server_info lacks what is off"),
    Hook(targets.ON_IDLE, server_info.tell_without_backend, "AFTER", "metrics do not tell what is off"),
)
# For servers whose decode steps may be routed either way.
GRAPH_HOOKS: tuple[Hook, ...] = (
    Hook(
        targets.MAKE_GRAPH_KEY,
        graph_variants.around_make_graph_key,
        "AROUND",
        "all steps of decode graphs run packed",
    ),
    Hook(
        targets.CAPTURE_ONE_SHAPE,
        graph_variants.around_capture_one_shape,
        "AROUND",
        "all steps of decode graphs run packed",
    ),
)
# For models whose images have attention masks of their own, over the stock backend that reads them.
IMAGE_MASK_HOOKS: tuple[Hook, ...] = (
    Hook(
        targets.PREPARE_ATTN_MASKS,
        gemma3_image_mask.around_prepare_attn_masks,
        "AROUND",
        "tokens of an image do not see those that come after them",
    ),
)


def handover_hooks(hooks: HandoverHooks) -> tuple[Hook, ...]:
    """Hooks that hand the paths of steps over."""
    return (
        Hook(targets.FORWARD_BATCH_INIT, hooks.after_forward_batch_init, "AFTER", "no step runs packed"),
        Hook(targets.MODEL_RUNNER_FORWARD, hooks.around_forward, "AROUND", "no step runs packed"),
    )


def verify_hooks(hooks: HandoverHooks) -> tuple[Hook, ...]:
    """Hooks for servers that check drafts in packed graphs."""
    return (
        Hook(targets.LOAD_BATCH, hooks.around_forward, "AROUND", "drafts in decode graphs are checked without sharing"),
    )


def scheduling_hooks(settings: Settings, state: PluginState) -> tuple[Hook, ...]:
    """Hooks for gatekeepers of admission; of servers whose settings ask for pins or retention also the others."""
    admission = state.own(Admission, state.counters.failures)
    others: tuple[Hook, ...] = ()
    if settings.group_scheduling:
        admission.enlist(state.own(GroupScheduler, state.counters.failures))
        others += state.own(StepSizes, state.counters.failures).hooks()
    if registration.is_asked_for(settings):
        from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningHooks
        from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings

        pins = state.own(PinningHooks, PinningSettings.of(settings), state.counters.failures)
        admission.enlist(pins)
        others += pins.table()
    return admission.hooks() + others


def cpu_hooks(fallbacks: CpuFallbacks) -> tuple[Hook, ...]:
    """Hooks for runners on the CPU. The module of `get_last_loc` depends on the SGLang version."""
    has_late = importlib.util.find_spec("sglang.srt.mem_cache.allocation") is not None
    return (
        Hook(
            targets.SUPPORT_TRITON,
            fallbacks.around_support_triton,
            "AROUND",
            "SGLang tries to run Triton kernels on the CPU",
        ),
        Hook(
            targets.GET_LAST_LOC if has_late else targets.GET_LAST_LOC_EARLY,
            fallbacks.around_get_last_loc,
            "AROUND",
            "SGLang tries to run Triton kernels on the CPU with a page size above 1",
        ),
    )
