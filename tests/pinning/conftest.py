"""What all tests of pinning have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_hooks_afterwards() -> Iterator[None]:
    yield
    state = sys.modules.get("sgl_prefix_attn.sglang_plugin.pinning.state")  # some tests need no SGLang
    if state is not None:
        state.activate(None)
