"""Facts of a server that nothing runs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts

_FIELDS = {field.name for field in dataclasses.fields(ServerFacts)}


def server_facts(**given: Any) -> ServerFacts:
    """Facts of a CPU server without a model, but for what is given: fields, and server arguments by their names."""
    arguments = SimpleNamespace(**{name: value for name, value in given.items() if name not in _FIELDS})
    usual = {"device": "cpu", "kv_cache_dtype": torch.bfloat16, "dtype": torch.bfloat16, "arguments": arguments}
    facts = {name: value for name, value in given.items() if name in _FIELDS}
    return ServerFacts.read(given.get("model_config"), **usual | facts)
