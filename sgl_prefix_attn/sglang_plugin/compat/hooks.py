"""Registers hooks on names of SGLang and checks that they are in place.

SGLang logs and swallows errors while it applies hooks. So a hook counts as applied only if the function that SGLang
will call has it in its chain of wrappers.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from sgl_prefix_attn.sglang_plugin.compat.targets import Target


@dataclass(frozen=True)
class Hook:
    """A hook on a name of SGLang.

    Attributes:
        kind: name of a HookType of SGLang.
        consequence: effect on the server if the hook is missing, for the log.
    """

    target: Target
    function: Callable[..., Any]
    kind: str
    consequence: str


def register(hooks: tuple[Hook, ...]) -> None:
    """Adds hooks to SGLang's registry. SGLang applies them when all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target.path, hook.function, HookType[hook.kind])


def ensure_applied(hooks: tuple[Hook, ...]) -> list[Hook]:
    """Applies the hooks that are not in place yet; some launchers load no plug-ins. Returns those still missing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    missing = [hook for hook in hooks if not is_applied(hook)]
    if missing:
        register(tuple(missing))
        HookRegistry.apply_hooks()
        missing = [hook for hook in missing if not is_applied(hook)]
    if missing:
        # The registry applies a target once. Where another plug-in had it before, ours go by another name of it.
        for hook in missing:
            if (alias := _alias(hook.target.path)) is not None:
                HookRegistry.register(alias, hook.function, HookType[hook.kind])
        HookRegistry.apply_hooks()
    return [hook for hook in missing if not is_applied(hook)]


def _alias(path: str) -> str | None:
    """`package.module:Class.method` for a method's path; None for other targets, and for what does not exist."""
    owner_path, _, name = path.rpartition(".")
    module, _, class_name = owner_path.rpartition(".")
    owner = getattr(sys.modules.get(module), class_name, None)
    return f"{module}:{class_name}.{name}" if isinstance(owner, type) and hasattr(owner, name) else None


def is_applied(hook: Hook) -> bool:
    """Whether calling the target runs the hook."""
    owner_path, _, name = hook.target.path.rpartition(".")
    try:
        function = getattr(pkgutil.resolve_name(owner_path), name)
    except (ImportError, AttributeError):
        return False
    return any(_is_same(hook.function, held) for wrapper in _wrappers(function) for held in _closure(wrapper))


def _is_same(function: Any, held: Any) -> bool:
    # Each access to a bound method makes another object.
    return held is function or (isinstance(held, MethodType) and held == function)


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
