"""What the code of a model says about its attention layers. Read from its source, as no model is built here."""

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
_ATTENTION_TYPE = re.compile(r"\battn_type=AttentionType\.(\w+),?\s")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def knows_attention_groups(model_class: type) -> bool:
    """Whether the attention layers of a model divide their heads by the ranks of an attention group.

    With data parallel attention or `--attn-cp-size` SGLang's KV pool does. Models that divide by all tensor-parallel
    ranks differ from it.

    True too if no such layer is found, or if the model's configuration chooses between layers of both kinds.

    Args:
        model_class: SGLang's class of the model.
    """
    found = _attention_classes(model_class)
    return not found or any(_ATTENTION_GROUP.search(_source(parent)) for kind in found for parent in _of_models(kind))


def attention_type(model_class: type) -> str:
    """The member of SGLang's AttentionType that the attention layers of a model have: DECODER unless they name another.

    DECODER too if the model's configuration chooses.

    Args:
        model_class: SGLang's class of the model.
    """
    found = {name for kind in _attention_classes(model_class) for name in _ATTENTION_TYPE.findall(_source(kind))}
    return found.pop() if len(found) == 1 else "DECODER"


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
