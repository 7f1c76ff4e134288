"""Which hooks there are, their registration with SGLang's HookRegistry, and whether they really sit in place.

SGLang logs and swallows what goes wrong while hooks are applied, so nothing is taken for granted: a hook counts as
applied when the function that SGLang will call has it in its chain of wrappers.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.sglang_plugin import (
    cpu_traps,
    graph_routes,
    group_scheduling,
    handover,
    image_masks,
    state,
    targets,
)


@dataclass(frozen=True)
class Hook:
    """A hook of ours: `kind` names a HookType of SGLang, `consequence` says what follows if it is not applied."""

    target: targets.Target
    function: Callable[..., Any]
    kind: str
    consequence: str


HANDOVER_HOOKS: tuple[Hook, ...] = (
    Hook(targets.FORWARD_BATCH_INIT, handover.after_forward_batch_init, "AFTER", "no step runs packed"),
    Hook(targets.MODEL_RUNNER_FORWARD, handover.around_model_runner_forward, "AROUND", "no step runs packed"),
)
OTHER_HOOKS: tuple[Hook, ...] = (
    Hook(targets.INTERNAL_STATE, state.after_get_internal_state, "AFTER", "GET /server_info lacks our state"),
    Hook(targets.ON_IDLE, state.after_on_idle, "AFTER", "metrics lag by some steps while the server is idle"),
    Hook(targets.CALC_PRIORITY, group_scheduling.after_calc_priority, "AFTER", "offline jobs run as they come"),
    Hook(targets.ADD_ONE_REQ, group_scheduling.around_add_one_req, "AROUND", "offline jobs run as they come"),
)
# Where decode steps may go either way.
GRAPH_HOOKS: tuple[Hook, ...] = (
    Hook(
        targets.MAKE_GRAPH_KEY,
        graph_routes.around_make_graph_key,
        "AROUND",
        "all steps of decode graphs run packed",
    ),
    Hook(
        targets.CAPTURE_ONE_SHAPE,
        graph_routes.around_capture_one_shape,
        "AROUND",
        "all steps of decode graphs run packed",
    ),
)

# For models whose images have masks of their own, over the backend that reads them.
IMAGE_MASK_HOOKS: tuple[Hook, ...] = (
    Hook(
        targets.PREPARE_ATTN_MASKS,
        image_masks.around_prepare_attn_masks,
        "AROUND",
        "tokens of an image do not see those that come after them",
    ),
)


def cpu_hooks() -> tuple[Hook, ...]:
    """Hooks for runners on the CPU; which module has `get_last_loc` depends on the SGLang version."""
    has_late = importlib.util.find_spec("sglang.srt.mem_cache.allocation") is not None
    return (
        Hook(
            targets.SUPPORT_TRITON,
            cpu_traps.around_support_triton,
            "AROUND",
            "SGLang tries to run Triton kernels on the CPU",
        ),
        Hook(
            targets.GET_LAST_LOC if has_late else targets.GET_LAST_LOC_EARLY,
            cpu_traps.around_get_last_loc,
            "AROUND",
            "SGLang tries to run Triton kernels on the CPU with a page size above 1",
        ),
    )


def register(hooks: tuple[Hook, ...]) -> None:
    """Hands hooks to the registry; SGLang applies them when all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target.path, hook.function, HookType[hook.kind])


def ensure_applied(hooks: tuple[Hook, ...]) -> list[Hook]:
    """Applies those hooks that are not in place yet (a launcher that loads no plug-ins); returns what is missing."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = tuple(hook for hook in hooks if not is_applied(hook))
    if missing:
        register(missing)
        HookRegistry.apply_hooks()
    return [hook for hook in missing if not is_applied(hook)]


def is_applied(hook: Hook) -> bool:
    """Whether calling the target runs the hook."""
    owner_path, _, name = hook.target.path.rpartition(".")
    try:
        function = getattr(pkgutil.resolve_name(owner_path), name)
    except (ImportError, AttributeError):
        return False
    return any(hook.function is held for wrapper in _wrappers(function) for held in _closure(wrapper))


def _wrappers(function: Any) -> Iterator[Any]:
    function = getattr(function, "__func__", function)
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
