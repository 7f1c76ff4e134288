"""The diff that is offered to SGLang: it fits the newest release, and SGLang's own test of it holds with it only."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS
from tests.support.wheels import REPOSITORY, WheelUnavailableError, sglang_wheel

PATCHES = REPOSITORY / "patches"
DIFF = PATCHES / "prepare_schedule_batch.patch"


def unpacked(folder: Path, wanted: str = "") -> Path:
    """The newest SGLang, or one file of it, in a folder."""
    try:
        wheel = sglang_wheel(SUPPORTED_VERSIONS[-1])
    except WheelUnavailableError as reason:
        pytest.skip(str(reason))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/multimodal_gen/" not in name and wanted in name]
        archive.extractall(folder, names)
    return folder


def apply(root: Path, *options: str) -> None:
    subprocess.run(["git", "apply", *options, str(DIFF)], cwd=root, check=True)


def run_test(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs SGLang's test with the SGLang in a folder, on the packages that are installed here."""
    environment = {**os.environ, "PYTHONPATH": str(root), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, str(PATCHES / "test_prepare_schedule_batch.py")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def test_the_diff_fits_compiles_and_reverts(tmp_path: Path) -> None:
    root = unpacked(tmp_path, "/srt/")
    files = [root / line[6:] for line in DIFF.read_text().splitlines() if line.startswith("+++ b/")]
    published = [file.read_bytes() for file in files]
    apply(root)
    for file, before in zip(files, published, strict=True):
        assert file.read_bytes() != before
        compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    apply(root, "--reverse")
    assert [file.read_bytes() for file in files] == published


@pytest.mark.slow
def test_the_test_passes_with_the_patch_only(tmp_path: Path) -> None:
    unpacked(tmp_path)
    # SGLang's test utilities import this package for benchmarks.
    (tmp_path / "datasets.py").write_text("load_dataset = None\n")
    apply(tmp_path)
    passed = run_test(tmp_path)
    assert passed.returncode == 0, passed.stderr
    assert "Ran 8 tests" in passed.stderr
    apply(tmp_path, "--reverse")
    failed = run_test(tmp_path)
    assert failed.returncode == 1
    assert "prepare_schedule_batch" in failed.stderr
