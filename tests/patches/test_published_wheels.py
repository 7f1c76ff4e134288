"""Every supported published wheel: the diff applies exactly, the result compiles, reverting gives the bytes back."""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest

from sgl_prefix_attn.patching.diffs import load_patches, patches_for
from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS
from tests.patches.conftest import unpacked_wheel


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_apply_check_compile_revert(version: str, tmp_path: Path) -> None:
    wheel = unpacked_wheel(version, tmp_path)
    published = wheel.contents()
    assert wheel.patch("check") == 1

    assert wheel.patch("apply") == 0
    assert wheel.patch("check") == 0
    changed = {name for name, content in wheel.contents().items() if published.get(name) != content}
    assert changed == set(wheel.files), "exactly the files of the diffs, and nothing left beside them"
    assert all(compileall.compile_file(str(wheel.root / file), quiet=1, force=True) for file in wheel.files)

    assert wheel.patch("revert") == 0
    assert wheel.patch("check") == 1
    assert wheel.contents() == published


def test_each_supported_version_has_the_seam_and_each_file_one_diff() -> None:
    for version in SUPPORTED_VERSIONS:
        patches = patches_for(version, load_patches())
        assert [patch.name for patch in patches] == ["prepare_schedule_batch"], version
        files = [file for patch in patches for file in patch.files]
        assert len(files) == len(set(files)), version
    assert {version for patch in load_patches() for version in patch.versions} == set(SUPPORTED_VERSIONS)
