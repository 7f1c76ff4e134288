"""What all rooms of tests need: a mark of its own, and SGLang's CPU path where there is no GPU."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

# SGLang decides when it is imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    # How long an example takes says more about what else the machine does.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")
    config.addinivalue_line("markers", "versions: the quick end-to-end set that `make test-versions` runs")
