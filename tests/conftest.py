"""Settings of all test folders: SGLang's CPU path where there is no GPU, and what parallel workers share."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# What stands for session fixtures of 10 s or more, by folder: files that use one run on one worker.
SHARED_FIXTURES = {
    "stock_server": ("tests/e2e/", re.compile(r"def \w+\([^)]*\b(stock_server|packed|expected|rollout_on)\b")),
    "emulation": ("tests/cuda/", re.compile(r"def \w+\([^)]*\bemulation\b")),
    "forks": ("tests/", re.compile(r"\b(launch: Launch|import (forked_server|launch_line))")),
}
# Files of half a minute or more by a few tests, which would keep one worker busy at the end.
LONG = re.compile(r"tests/(test_package|cuda/test_(triton_interpreter|emulated_capabilities)|pinning/test_schedules)")
ROOT = Path(__file__).parents[1]

# SGLang reads it at import.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="JSON of GPU tests: what passed, which is left out next time")


def pytest_configure(config: pytest.Config) -> None:
    # The duration of an example depends on the load of the machine.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In the background of a shell. Servers would inherit that, and a stop waits 8 s for those that ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_root_handlers_of_sglang() -> Iterator[None]:
    """SGLang's classes configure the root logger. Its handler would write to the captured stream of an ended test."""
    yield
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take whole groups. `--dist loadgroup` of pytest-xdist 3.8 ignores its groups with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return Groups(config, log)


@cache
def group_of(file: str) -> str:
    """The shared fixture that a test file uses, else the file itself."""
    text = (ROOT / file).read_text()
    uses = (name for name, (folder, use) in SHARED_FIXTURES.items() if file.startswith(folder) and use.search(text))
    return next(uses, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups come first, so that both workers end at about the same time."""
    if not IS_WORKER:
        return
    groups = {item: group_of(item.nodeid.partition("::")[0]) for item in items}
    servers = {groups[item] for item in items if item.get_closest_marker("e2e") is not None}
    first = {name: place for place, name in enumerate(SHARED_FIXTURES)}
    others = {item: len(first) + (LONG.match(group) is None) + (group not in servers) for item, group in groups.items()}
    items.sort(key=lambda item: first.get(groups[item], others[item]))
