"""Every test starts and ends without plug-in state. Without SGLang, only the tests that do not import it run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_prefix_attn.sglang_plugin.backend import plugin_state

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["backend/*", "dispatch/*", "execution/*", "test_*.py"]
    collect_ignore_glob += ["compat/test_[!c]*", "compat/test_cpu*"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hooks that the factory asks for; none is applied."""
    from sgl_prefix_attn.sglang_plugin.compat import hooks

    wanted: list[Any] = []
    monkeypatch.setattr(hooks, "ensure_applied", lambda more: wanted.extend(more) or [])
    return wanted


@pytest.fixture(autouse=True)
def _no_plugin_state() -> Iterator[None]:
    plugin_state.reset()
    yield
    plugin_state.reset()
