"""Lets torchvision be imported when its compiled operators cannot be loaded.

SGLang imports torchvision unconditionally. The wheel on PyPI is built for CUDA, so beside a CPU torch its native
library does not load. torchvision tolerates that, except that it describes two operators to torch which then do not
exist, and the import fails with "operator torchvision::nms does not exist". This hook declares those two, without
implementations, just before torchvision needs them. It does nothing where the native library loads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_DESCRIBES_OPERATORS = "torchvision._meta_registrations"
_BOXES_TO_INDICES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_DECLARATIONS = tuple(f"{operator}{_BOXES_TO_INDICES}" for operator in ("nms", "qnms"))


class OperatorDeclarer:
    """Finds no module itself; uses the moment torchvision asks for its operator descriptions."""

    def __init__(self) -> None:
        self.library: object = None  # torch drops the declarations when this object dies

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _DESCRIBES_OPERATORS and self.library is None:
            self._declare()
        return None

    def _declare(self) -> None:
        from torch.library import Library
        from torchvision import extension

        if extension._has_ops():
            return
        library = Library("torchvision", "FRAGMENT")
        for declaration in _DECLARATIONS:
            library.define(declaration)
        self.library = library


def install() -> None:
    """Put the hook in front of Python's own finders; a second call changes nothing."""
    if not any(isinstance(finder, OperatorDeclarer) for finder in sys.meta_path):
        sys.meta_path.insert(0, OperatorDeclarer())
