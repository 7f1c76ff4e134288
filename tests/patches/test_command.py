"""The patch command: refusals, repairs, and that it changes all files or none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.patching.diffs import load_patches
from sgl_prefix_attn.patching.errors import PatchError
from tests.patches.conftest import UnpackedWheel, unpacked_wheel

Capture = pytest.CaptureFixture[str]
BASE = "sglang/srt/layers/attention/base_attn_backend.py"
WORKER = "sglang/srt/managers/tp_worker.py"


@pytest.fixture
def wheel(tmp_path: Path) -> UnpackedWheel:
    return unpacked_wheel("0.5.20", tmp_path / "site-packages")


def append(wheel: UnpackedWheel, file: str, text: str) -> None:
    with open(wheel.root / file, "a", encoding="utf-8") as stream:
        stream.write(text)


def remove_metadata(wheel: UnpackedWheel) -> None:
    for path in wheel.root.glob("*.dist-info/*"):
        if path.is_file():
            path.unlink()


def test_apply_twice_and_revert_without_apply_are_no_errors(wheel: UnpackedWheel, capsys: Capture) -> None:
    assert wheel.patch("revert") == 0
    assert "was not applied" in capsys.readouterr().out
    assert wheel.patch("apply") == 0
    patched = wheel.contents()
    assert wheel.patch("apply") == 0
    assert "already applied" in capsys.readouterr().out
    assert wheel.contents() == patched


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_dry_runs_and_files_changed_by_others_change_nothing(wheel, action, capsys):
    if action == "revert":
        assert wheel.patch("apply") == 0
    before = wheel.contents()
    capsys.readouterr()
    assert wheel.patch(action, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "would be" in output
    assert all(file in output for file in wheel.files)
    assert wheel.contents() == before

    append(wheel, WORKER, "\n# changed far away from the diff\n")
    before = wheel.contents()
    assert wheel.patch("check") == 3
    assert f"modified: {WORKER}" in capsys.readouterr().out
    assert wheel.patch(action) == 3
    message = capsys.readouterr().err
    assert WORKER in message
    assert BASE not in message
    assert "pip install --force-reinstall" in message
    assert wheel.contents() == before


def test_a_missing_file_is_refused_and_named(wheel: UnpackedWheel, capsys: Capture) -> None:
    (wheel.root / BASE).unlink()
    assert wheel.patch("check") == 3
    assert f"missing: {BASE}" in capsys.readouterr().out
    assert wheel.patch("apply") == 3


@pytest.mark.parametrize(("action", "state"), [("apply", 0), ("revert", 1)])
def test_a_half_applied_diff_is_seen_and_finished_or_removed(wheel, action, state, capsys):
    published = (wheel.root / WORKER).read_bytes()
    assert wheel.patch("apply") == 0
    (wheel.root / WORKER).write_bytes(published)
    assert wheel.patch("check") == 3
    output = capsys.readouterr().out
    assert "applied to some files only" in output
    assert f"not applied: {WORKER}" in output
    assert wheel.patch(action) == 0
    assert wheel.patch("check") == state


@pytest.mark.parametrize("failing_call", [1, 3])
def test_when_a_file_cannot_be_written_no_file_is(wheel, failing_call, monkeypatch, capsys):
    before = wheel.contents()
    replace, calls = os.replace, []

    def full_disk(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == failing_call:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    assert wheel.patch("apply") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert wheel.contents() == before, "neither changed files nor leftovers"


def test_without_published_hashes_the_quoted_lines_decide(wheel: UnpackedWheel) -> None:
    """An editable install lists no files in its metadata: changes elsewhere in a file are not seen and survive."""
    remove_metadata(wheel)
    append(wheel, WORKER, "\n# local work\n")
    before = wheel.contents()
    assert [wheel.patch(action) for action in ("check", "apply", "check", "revert")] == [1, 0, 0, 0]
    assert wheel.contents() == before
    text = (wheel.root / BASE).read_text("utf-8")
    (wheel.root / BASE).write_text(text.replace("    def init_forward_metadata(", "    def renamed("), "utf-8")
    assert [wheel.patch(action) for action in ("check", "apply")] == [3, 3]


def test_a_version_without_diff_and_an_unknown_version_are_refused(wheel: UnpackedWheel, capsys: Capture) -> None:
    remove_metadata(wheel)
    version = wheel.root / "sglang" / "_version.py"
    version.write_text("__version__ = version = '0.5.9'\n", "utf-8")
    for action in ("apply", "revert", "check"):
        assert wheel.patch(action) == 2
        message = capsys.readouterr().err
        assert "no diff for sglang 0.5.9" in message
        assert "0.5.14 0.5.15 0.5.15.post1 0.5.16" in message
    version.unlink()
    assert wheel.patch("check") == 2
    assert "cannot tell the version" in capsys.readouterr().err


def test_no_sglang_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert main(["patch", "check", "--sglang-path", str(tmp_path)]) == 2
    assert f"--sglang-path {tmp_path}" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["patch", "check"]) == 2
    assert "SGLang is not installed" in capsys.readouterr().err


def test_mode_is_kept_and_a_hard_link_into_a_package_cache_is_not_written_through(wheel: UnpackedWheel) -> None:
    published = (wheel.root / WORKER).read_bytes()
    (wheel.root / WORKER).chmod(0o640)
    in_cache = wheel.root.parent / "tp_worker.py"
    os.link(wheel.root / WORKER, in_cache)
    assert wheel.patch("apply") == 0
    assert in_cache.read_bytes() == published
    assert stat.S_IMODE((wheel.root / WORKER).stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Versions: 1.0\nSummary: a\n\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n", "no Reason"),
        ("Versions: 1.0\nSummary: a\nReason: b\n\nno diff follows\n", "not a unified diff"),
    ],
)
def test_a_diff_without_reason_or_hunks_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "1.0").mkdir()
    (tmp_path / "1.0" / "seam.patch").write_text(text, "utf-8")
    with pytest.raises(PatchError, match=complaint):
        load_patches(tmp_path)
