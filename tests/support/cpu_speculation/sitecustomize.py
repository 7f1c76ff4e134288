"""Applies `torch_native_speculation` to modules of SGLang after their import."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

PATCHES = {
    "sglang.srt.layers.attention.torch_native_backend": "add_verify_steps",
    "sglang.srt.speculative.draft_utils": "add_draft_backends",
}


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: str) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import torch_native_speculation

        getattr(torch_native_speculation, self._patch)(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _PatchingLoader(spec.loader, PATCHES[fullname])
        return spec


sys.meta_path.insert(0, _Finder())
