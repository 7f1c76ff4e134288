"""Servers whose KV cache is fp8 e4m3, where SGLang has that on a CPU without AMX: up to 0.5.19, without scales."""

from __future__ import annotations

import importlib.metadata

import pytest

from sgl_prefix_attn.demo.workload import Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import Launch, compared

VERSION = tuple(int(part) for part in importlib.metadata.version("sglang").split(".")[:3] if part.isdigit())
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.versions,
    pytest.mark.skipif(VERSION >= (0, 5, 20), reason="this SGLang wants AMX and its own backend for fp8 KV on a CPU"),
]


@pytest.mark.parametrize("name", ["three_levels", "ragged"])
def test_tokens_are_those_of_the_stock_backend_over_the_same_kind_of_cache(
    launch: Launch, vocabulary: Vocabulary, name: str
) -> None:
    _, state, _ = compared(launch, [getattr(workloads, name)(vocabulary)], "--kv-cache-dtype", "fp8_e4m3")
    assert state["shape"]["kv_bytes"] == 1
