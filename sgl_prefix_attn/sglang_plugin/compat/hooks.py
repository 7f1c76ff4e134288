"""Registers hooks on names of SGLang and checks that they are in place.

SGLang logs and swallows errors while it applies hooks. So a hook counts as applied only if the function that SGLang
will call has it in its chain of wrappers.
"""

from __future__ import annotations

import pkgutil
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
