"""Settings of all test folders: SGLang's CPU path where there is no GPU, and what parallel workers share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Session fixtures that take 10 s or more: the files that use one run on one worker, one after the other.
SHARED_FIXTURES = ("stock", "emulation")

# SGLang reads it at import.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    # The duration of an example depends on the load of the machine.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests for `--dist loadgroup`: by shared fixture, else by file; the longest groups come first."""
    if not IS_WORKER:
        return
    groups: dict[Path, str] = {}
    servers = set()
    for item in items:
        shared = [name for name in SHARED_FIXTURES if name in getattr(item, "fixturenames", ())]
        group = groups.setdefault(item.path, str(item.path))
        groups[item.path] = shared[0] if shared else group
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(groups[item.path]))
        if item.get_closest_marker("e2e") is not None:
            servers.add(groups[item.path])
    items.sort(key=lambda item: _order(groups[item.path], servers))


def _order(group: str, servers: set[str]) -> int:
    """The longest groups first, so that both workers end at about the same time."""
    return SHARED_FIXTURES.index(group) * 2 if group in SHARED_FIXTURES else 1 if group in servers else 3
