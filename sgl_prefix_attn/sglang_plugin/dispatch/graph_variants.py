"""A second decode graph for each batch size, held by the stock backend alone.

SGLang's decode graph runner captures one graph for each batch size, under a key that has a label for variants. A
captured graph holds either packed layers or stock layers. Where decode steps may be routed either way, each size is
captured twice: once packed, and once more with a decision for the stock backend under a key with our label. At a
replay, the key gets the label if the step was routed to the stock backend. Input buffers, memory pool and streams
stay SGLang's.

The step is decided in `init_forward_metadata_out_graph`. Every supported version calls it before it makes the key.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures, several_ranks

logger = logging.getLogger(__name__)

LABEL = "prefixpack-stock"


class GraphVariants:
    """The decode graphs of the stock backend beside the packed ones.

    Args:
        wanted: whether graphs of a forward mode are captured for both.
        failures: exceptions of the process, and what is off.

    Attributes:
        capturing: whether the present capture is one of the stock backend's variants.
    """

    def __init__(self, wanted: Callable[[Any], bool], failures: Failures) -> None:
        self._wanted, self._failures = wanted, failures
        self._sizes: set[int] = set()
        self._failed = False
        self._asked_for_key = False
        self.capturing = False

    @property
    def sizes(self) -> list[int]:
        """Batch sizes with a variant."""
        return sorted(self._sizes)

    def has(self, size: int) -> bool:
        """Whether a batch padded to `size` requests has a variant to replay."""
        return size in self._sizes

    def capture(self, runner: Any, size: int, capture: Callable[[], Any]) -> Any:
        """Captures a size packed and then, if wanted, for the stock backend.

        Args:
            runner: SGLang's decode graph runner.
            capture: captures the size.
        """
        self._asked_for_key = False
        self._sizes.discard(size)  # SGLang may have dropped its graphs to capture them anew
        result = capture()
        if self._failed or not self._wanted(runner.capture_forward_mode):
            return result
        if not self._asked_for_key:
            self._fail("this SGLang does not ask for graph keys where it did")
        elif getattr(runner, "enable_profile_cuda_graph", False):
            self._fail("SGLang profiles its captures and expects one for each size")
        else:
            self._capture_variant(size, capture)
        return result

    def _capture_variant(self, size: int, capture: Callable[[], Any]) -> None:
        self.capturing = True
        try:
            capture()
            self._sizes.add(size)
        except Exception as error:  # the guard of the variants: the server runs without them
            if several_ranks():  # all ranks have to make the same captures
                logger.error("prefixpack: no decode graphs of the stock backend; start with PREFIXPACK_ROUTE=packed")
                raise
            self._failures.failed("graph_variants", error, "decode graphs of this size have packed layers only")
            self._fail("if memory was short, lower --mem-fraction-static, or set route to packed")
        finally:
            self.capturing = False

    def _fail(self, why: str) -> None:
        self._failed = True
        self._failures.switch_off("graph_variants", why)
        logger.warning(
            "prefixpack: decode graphs of %s hold packed layers only, so their steps are not routed: %s",
            f"fewer than {min(self._sizes)} requests" if self._sizes else "all sizes",
            why,
        )

    def key(self, key: Any, is_variant: bool) -> Any:
        """The key of the graph that is captured or replayed.

        Args:
            key: SGLang's key.
            is_variant: whether the present step was decided for the stock backend's variant.
        """
        self._asked_for_key = True
        if not is_variant or not (self.capturing or key.size in self._sizes):
            return key
        label = LABEL if key.variant_label is None else f"{key.variant_label}+{LABEL}"
        return dataclasses.replace(key, variant_label=label)


def packing_backend(runner: Any) -> Any:
    """The backend with `graph_variants` and `decision` that a decode graph runner works for, None if it has none."""
    candidates = [getattr(runner, "attn_backend", None)]  # runners of draft models have others
    # SGLang wraps ours in another backend where prefill and decode have different ones, and where the model also has
    # layers of linear attention. The two wrappers may be nested in either order.
    for candidate in candidates:
        if isinstance(getattr(candidate, "graph_variants", None), GraphVariants):
            return candidate
        wrapped = (getattr(candidate, name, None) for name in ("decode_backend", "full_attn_backend"))
        candidates += [backend for backend in wrapped if backend is not None]
    return None


def around_capture_one_shape(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `DecodeCudaGraphRunner.capture_one_shape`."""
    backend = packing_backend(runner)
    if backend is None:
        return original(runner, *args, **kwargs)
    size = args[0] if args else kwargs["size"]
    return backend.graph_variants.capture(runner, size, lambda: original(runner, *args, **kwargs))


def around_make_graph_key(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `DecodeCudaGraphRunner._make_graph_key`."""
    key = original(runner, *args, **kwargs)
    backend = packing_backend(runner)
    return key if backend is None else backend.graph_variants.key(key, backend.decision.is_graph_variant)
