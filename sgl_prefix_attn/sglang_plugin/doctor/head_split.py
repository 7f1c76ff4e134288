"""Over which ranks a model's code spreads its attention heads. Read from its source, as no model is built here.

With data parallel attention or `--attn-cp-size` SGLang's KV pool has the heads of a rank of an attention group. Some
models divide their heads in the same way. Others divide by all tensor-parallel ranks, and differ from the pool.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

_MODELS = "sglang.srt.models."
_BUILDS_ATTENTION = re.compile(r"\bRadixAttention\(")
_ATTENTION_GROUP = re.compile(r"\b(?:attn_tp_size|get_attention_tp_size)\b")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def knows_attention_groups(model_class: type) -> bool:
    """Whether the attention layers of a model divide their heads by the ranks of an attention group.

    True too if no such layer is found, or if the model's configuration chooses between layers of both kinds.

    Args:
        model_class: SGLang's class of the model.
    """
    found = _attention_classes(model_class)
    return not found or any(_ATTENTION_GROUP.search(_source(parent)) for kind in found for parent in _of_models(kind))


def _attention_classes(model_class: type) -> list[type]:
    """The classes that build RadixAttention and are nearest to a model's class, by the names in its source.

    A class's bases are among these names, so layers that it puts in the place of its base's are nearer.
    """
    nearest, seen = [model_class], {model_class}
    while nearest:
        found = [kind for kind in nearest if _BUILDS_ATTENTION.search(_source(kind))]
        if found:
            return found
        named = {other for kind in nearest for name in _NAME.findall(_source(kind)) for other in _behind(kind, name)}
        nearest = list(named - seen)
        seen |= named
    return []


def _behind(kind: type, name: str) -> Iterator[type]:
    """Modules of SGLang's models that a name in a class's source may stand for."""
    found: Any = vars(sys.modules[kind.__module__]).get(name)
    for value in found.values() if isinstance(found, dict) else (found,):
        if inspect.isclass(value) and issubclass(value, torch.nn.Module) and _of_models(value)[:1] == [value]:
            yield value


def _of_models(kind: type) -> list[type]:
    return [parent for parent in kind.__mro__ if parent.__module__.startswith(_MODELS)]


@functools.cache
def _source(kind: type) -> str:
    return inspect.getsource(kind)
