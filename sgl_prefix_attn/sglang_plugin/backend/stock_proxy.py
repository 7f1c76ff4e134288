"""Looks to SGLang like the stock backend, whatever SGLang asks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.sglang_plugin.backend.plugin_state import PluginState
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

_OF_LAYERS_AND_GRAPHS = ("forward", "forward_decode", "forward_extend", "init_forward_metadata_in_graph")
_BEGIN_STEPS = ("init_forward_metadata", "init_forward_metadata_out_graph")


def _attribute(name: str) -> Any:
    """A property that reads and sets an attribute of the stock backend."""

    def get(self: Any) -> Any:
        return getattr(self.stock, name)

    def set_(self: Any, value: Any) -> None:
        setattr(self.stock, name, value)

    return property(get, set_, doc=f"`{name}` of the stock backend.")


def _delegation(name: str, member: Any) -> Any:
    """A member that does what the stock backend's does."""
    if not callable(member) or isinstance(member, type):
        return _attribute(name)

    @functools.wraps(member, updated=())  # an abstract member stays abstract in the base class alone
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.stock, name)(*args, **kwargs)

    return call


class StockProxy(AttentionBackend):
    """Answers SGLang as the backend in `stock` would, in all that a subclass does not define.

    SGLang looks at a backend in four ways:

    - **Members of the base class.** Each SGLang version has more of them, and their defaults would be wrong. Below this
      class, each becomes a delegation.
    - **Members that only the stock backend has.** `__getattr__` finds them.
    - **`isinstance`.** Models ask for the stock backend's class. In wrap mode `__class__` is that class.
    - **`type(backend).__name__`.** By it SGLang decides for the verify steps of DFLASH whether a graph gets a mask. A
      graph of Triton or FlashInfer with one would read what its capture left there: no step fills it. So each object
      is of a subclass with the stock backend's name, which `__new__` makes.

    Args:
        facts: of the server.
        stock: the stock backend.
        state: the state of the process.
        wraps: the stock backend's name in wrap mode. SGLang then takes this object for one of the stock backend's
            class. None: the process's one stock backend, under the name `prefixpack`.
    """

    _wraps: str | None = None
    # SGLang assigns these. SGLang before 0.5.19 has no `forward_metadata` in its base class.
    forward_metadata = _attribute("forward_metadata")
    token_to_kv_pool = _attribute("token_to_kv_pool")

    def __new__(cls, facts: Any = None, stock: Any = None, *args: Any, **kwargs: Any) -> Any:
        kind: Any = cls  # `cache` cannot tell that it is hashable
        return super().__new__(_named_as(kind, type(stock).__name__))

    def __init__(self, facts: ServerFacts, stock: Any, state: PluginState, *, wraps: str | None = None) -> None:
        self.stock = stock
        self.req_to_token_pool = facts.req_to_token_pool
        self._state = state
        self._wraps = wraps

    def __getattr__(self, name: str) -> Any:
        if name == "stock":  # __init__ has not set it yet
            raise AttributeError(name)
        return getattr(self.stock, name)

    # What `isinstance` sees besides the object's type, whose base is our own class.
    __class__ = property(lambda self: type(self).__base__ if self._wraps is None else type(self.stock))

    def pass_through(self, reason: Reason) -> None:
        """From now on, SGLang's calls reach the stock backend at once. Each step is counted as a fallback.

        The stock backend's methods lie in the instance: a lookup through our classes takes some tenths of a
        microsecond each.

        Args:
            reason: why no step runs packed.
        """
        state = self._state
        step_done = None if state.exporter is None else state.step_done
        for name in (*_OF_LAYERS_AND_GRAPHS, *_BEGIN_STEPS):
            method = getattr(self.stock, name, None)
            if method is not None:
                begins = name in _BEGIN_STEPS
                setattr(self, name, _counted(method, state.counters, reason, step_done) if begins else method)


for _name in dir(AttentionBackend):
    if _name not in vars(StockProxy) and not _name.startswith(("__", "_abc_")):
        setattr(StockProxy, _name, _delegation(_name, inspect.getattr_static(AttentionBackend, _name)))


@functools.cache
def _named_as(kind: Any, name: str) -> Any:
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # what `repr` shows
    return type(kind)(name, (kind,), members)


def _counted(
    method: Callable[..., None], counters: Counters, reason: Reason, step_done: Callable[[], None] | None
) -> Callable[..., None]:
    """A method that begins a step. Every step pays for this."""
    fallbacks = counters.fallbacks

    def begin(forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        if reason in fallbacks:
            fallbacks[reason] += 1
        else:
            counters.fallback(reason)
        if step_done is not None:
            step_done()
        method(forward_batch, *args, **kwargs)

    return begin
