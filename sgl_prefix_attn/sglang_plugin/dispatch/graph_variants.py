"""A second decode graph for every batch size, held by the stock backend alone, and the choice between the two.

SGLang's decode graph runner captures one graph for each batch size and keeps it under a key with a label for variants.
So a size is simply captured once more, the backend standing aside, under a key with our label; and the key of a replay
gets that label if the step was routed to the stock backend. Input buffers, memory pool and streams stay the runner's.

What may change is decided in `init_forward_metadata_out_graph`, which every supported version calls before it makes the
key of the replay.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

LABEL = "prefixpack-stock"


class GraphRoutes:
    """The graphs of the stock backend beside the packed ones.

    Args:
        wanted: whether graphs of a forward mode are to be captured for both.

    Attributes:
        capturing: whether what is captured right now is the stock backend's.
        replaying: whether the present step replays the stock backend's graph.
    """

    def __init__(self, wanted: Callable[[Any], bool]) -> None:
        self._wanted = wanted
        self._sizes: set[int] = set()
        self._failed = False
        self._asked_for_key = False
        self.capturing = False
        self.replaying = False

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that have a graph of the stock backend."""
        return sorted(self._sizes)

    def has(self, size: int) -> bool:
        """Whether a batch that is padded to `size` can be replayed on the stock backend."""
        return size in self._sizes

    def capture(self, runner: Any, size: int, capture: Callable[[], Any]) -> Any:
        """Captures a size for the packed kernels and then, if wanted, for the stock backend.

        Args:
            runner: SGLang's decode graph runner.
            capture: captures the size.
        """
        self.replaying = self._asked_for_key = False
        self._sizes.discard(size)  # SGLang may have thrown its graphs away to capture them anew
        result = capture()
        if self._failed or not self._wanted(runner.capture_forward_mode):
            return result
        if not self._asked_for_key:
            self._give_up("this SGLang does not ask for graph keys where it did")
        elif getattr(runner, "enable_profile_cuda_graph", False):
            self._give_up("SGLang profiles its captures, and counts on one for each size")
        else:
            self._capture_stock(size, capture)
        return result

    def _capture_stock(self, size: int, capture: Callable[[], Any]) -> None:
        self.capturing = True
        try:
            capture()
            self._sizes.add(size)
        except Exception:  # the guard of the second graphs: the server runs without them
            if several_ranks():  # they have to go through captures in step
                logger.error("prefixpack: no decode graphs of the stock backend; start with PREFIXPACK_ROUTE=packed")
                raise
            logger.exception("prefixpack: capturing decode graphs of the stock backend failed")
            self._give_up("if memory was short, lower --mem-fraction-static, or set route to packed")
        finally:
            self.capturing = False

    def _give_up(self, why: str) -> None:
        self._failed = True
        logger.warning(
            "prefixpack: decode graphs of %s hold packed layers only, so such steps are not routed: %s",
            f"fewer than {min(self._sizes)} requests" if self._sizes else "all sizes",
            why,
        )

    def key(self, key: Any) -> Any:
        """The key of the graph that is captured or replayed, from the one that SGLang made for the packed one."""
        self._asked_for_key = True
        if not self.capturing and not (self.replaying and key.size in self._sizes):
            return key
        label = LABEL if key.variant_label is None else f"{key.variant_label}+{LABEL}"
        return dataclasses.replace(key, variant_label=label)


def routes_of(runner: Any) -> GraphRoutes | None:
    """Those of the backend that a decode graph runner works for, None if that is not ours or has no choice."""
    candidates = [getattr(runner, "attn_backend", None)]  # runners of draft models have others
    # SGLang puts a backend before ours where prefill and decode have different ones, and where a model also has layers
    # of linear attention. One may stand before the other, in either order.
    for candidate in candidates:
        routes = getattr(candidate, "graph_routes", None)
        if isinstance(routes, GraphRoutes):
            return routes
        behind = (getattr(candidate, name, None) for name in ("decode_backend", "full_attn_backend"))
        candidates += [backend for backend in behind if backend is not None]
    return None


def around_capture_one_shape(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `DecodeCudaGraphRunner.capture_one_shape`."""
    routes = routes_of(runner)
    if routes is None:
        return original(runner, *args, **kwargs)
    size = args[0] if args else kwargs["size"]
    return routes.capture(runner, size, lambda: original(runner, *args, **kwargs))


def around_make_graph_key(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `DecodeCudaGraphRunner._make_graph_key`."""
    key = original(runner, *args, **kwargs)
    routes = routes_of(runner)
    return key if routes is None else routes.key(key)


def several_ranks() -> bool:
    """Whether other processes run the same model, in step with this one."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
