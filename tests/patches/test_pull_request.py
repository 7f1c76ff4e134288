"""SGLang's own test of the pull request, against the newest release with the patch and without it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS
from tests.support.wheels import REPOSITORY, WheelUnavailableError, sglang_wheel

NEWEST = SUPPORTED_VERSIONS[-1]
TEST = REPOSITORY / "patches" / NEWEST / "test_prepare_schedule_batch.py"


def run_test(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs SGLang's test with the SGLang in a folder, on the packages that are installed here."""
    environment = {**os.environ, "PYTHONPATH": str(root), "SGLANG_USE_CPU_ENGINE": "1"}
    return subprocess.run([sys.executable, str(TEST)], capture_output=True, text=True, env=environment, cwd=root)


@pytest.mark.slow
def test_the_test_passes_with_the_patch_only(tmp_path: Path) -> None:
    """`test_seam_behaviour.py` has the patched methods of every release, without the imports of two whole SGLangs."""
    try:
        wheel = sglang_wheel(NEWEST)
    except WheelUnavailableError as reason:
        pytest.skip(str(reason))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if "/multimodal_gen/" not in name])
    # SGLang's test utilities import this package for benchmarks.
    (tmp_path / "datasets.py").write_text("load_dataset = None\n")
    patch = ["patch", "apply", "--sglang-path", str(tmp_path)]
    assert main(patch) == 0
    passed = run_test(tmp_path)
    assert passed.returncode == 0, passed.stderr
    assert "Ran 8 tests" in passed.stderr
    assert main(["patch", "revert", *patch[2:]]) == 0
    failed = run_test(tmp_path)
    assert failed.returncode == 1
    assert "prepare_schedule_batch" in failed.stderr
