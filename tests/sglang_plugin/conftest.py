"""Every test starts and ends without plug-in state. Without SGLang, only the tests that do not import it run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from sgl_prefix_attn.sglang_plugin.backend import plugin_state

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = [
        "backend/*",
        "dispatch/*",
        "execution/*",
        "test_*.py",
        "compat/test_[!c]*",
        "compat/test_cpu*",
    ]


@pytest.fixture(autouse=True)
def _no_plugin_state() -> Iterator[None]:
    plugin_state.reset()
    yield
    plugin_state.reset()
