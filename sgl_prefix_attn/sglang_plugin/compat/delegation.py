"""Makes a wrapper backend answer like the backend that it wraps.

A wrapper that derives from SGLang's AttentionBackend would otherwise answer with the base class's defaults wherever it
defines nothing itself, and the base class grows with every SGLang version. So each member of the installed base class
that the wrapper does not define becomes a delegation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def delegated_members(base: type, wrapper: type) -> list[str]:
    """Members of `base` (its own bases included, `object` not) that `wrapper` does not define itself."""
    own = set(vars(wrapper))
    names: dict[str, None] = {}
    for parent in base.__mro__:
        if parent is object or parent.__module__ == "abc":
            continue
        for name in vars(parent):
            if name not in own and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_"):
                names[name] = None
    return list(names)


def delegate(base: type, attribute: str) -> Callable[[type], type]:
    """Class decorator: members of `base` that the class lacks are taken from the object in `self.<attribute>`."""

    def decorate(wrapper: type) -> type:
        for name in delegated_members(base, wrapper):
            member = _inherited(base, name)
            if callable(member) and not isinstance(member, type):
                setattr(wrapper, name, _method(attribute, name, member))
            else:
                setattr(wrapper, name, delegated(attribute, name))
        return wrapper

    return decorate


def _inherited(base: type, name: str) -> Any:
    return next(vars(parent)[name] for parent in base.__mro__ if name in vars(parent))


def _method(attribute: str, name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(member)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, attribute), name)(*args, **kwargs)

    return call


def delegated(attribute: str, name: str) -> Any:
    """A property that reads and sets `name` of the object in `self.<attribute>`."""

    def get(self: Any) -> Any:
        return getattr(getattr(self, attribute), name)

    def set_(self: Any, value: Any) -> None:
        setattr(getattr(self, attribute), name, value)

    return property(get, set_, doc=f"`{name}` of the stock backend.")
