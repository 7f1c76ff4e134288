"""Marks that more than one room uses."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "versions: the quick end-to-end set that `make test-versions` runs on each SGLang"
    )
