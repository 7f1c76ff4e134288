"""Compares an SGLang on disk with a diff, and applies or reverts the diff: all files or none."""

from __future__ import annotations

import base64
import enum
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sgl_prefix_attn.patching.diffs import SeamPatch
from sgl_prefix_attn.patching.errors import EXIT_MODIFIED, PatchError
from sgl_prefix_attn.patching.installation import Installation


class State(enum.Enum):
    """How a file, or all files of a diff together, compare with the published SGLang."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    PARTLY_APPLIED = "applied to some files only"
    MODIFIED = "modified"


@dataclass(frozen=True)
class FileReport:
    """One file of a diff: `content` is what is there, `other` the same file with the diff applied or reverted.

    Both are empty where the state is MODIFIED.
    """

    path: str
    state: State
    content: bytes = b""
    other: bytes = b""


def inspect(patch: SeamPatch, sglang: Installation) -> list[FileReport]:
    """Compares every file of the diff with the published one.

    A file counts as published, or as published plus diff, by the sha256 in the wheel's RECORD. Where there is none, as
    in an editable install, only the lines that the diff quotes can be compared.
    """
    contents = {}
    for name in patch.files:
        if (sglang.root / name).is_file():
            contents[name] = (sglang.root / name).read_bytes()
    applied = _rewrite(patch, contents, revert=False)
    reverted = _rewrite(patch, contents, revert=True)

    reports = []
    for name in patch.files:
        published = sglang.hashes.get(name)
        can_apply = name in applied and published in (None, _record_hash(contents[name]))
        can_revert = name in reverted and published in (None, _record_hash(reverted[name]))
        if can_apply == can_revert:
            reports.append(FileReport(name, State.MODIFIED))
        elif can_apply:
            reports.append(FileReport(name, State.NOT_APPLIED, contents[name], applied[name]))
        else:
            reports.append(FileReport(name, State.APPLIED, contents[name], reverted[name]))
    return reports


def _rewrite(patch: SeamPatch, contents: Mapping[str, bytes], revert: bool) -> dict[str, bytes]:
    """The changed files of a copy of `contents`, without the files that the diff does not fit."""
    with tempfile.TemporaryDirectory(prefix="prefixpack-patch-") as scratch:
        for name, content in contents.items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        # The return value is True for a file that has the diff already, so the contents are compared.
        (patch.diff.revert if revert else patch.diff.apply)(strip=1, root=scratch)
        results = {name: Path(scratch, name).read_bytes() for name in contents}
    return {name: result for name, result in results.items() if result != contents[name]}


def _record_hash(content: bytes) -> str:
    """sha256 the way RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode("ascii")


def overall(reports: list[FileReport]) -> State:
    """The state of a diff from the states of its files."""
    states = {report.state for report in reports}
    if State.MODIFIED in states:
        return State.MODIFIED
    return states.pop() if len(states) == 1 else State.PARTLY_APPLIED


def change(patch: SeamPatch, sglang: Installation, goal: State, dry_run: bool = False) -> list[str]:
    """Changes every file of the diff to `goal` (APPLIED or NOT_APPLIED) and verifies the files on disk.

    Returns the files that were, or with `dry_run` would be, written; none when the goal is already reached. A half
    applied diff is completed or removed. PatchError, with nothing changed, when a file was modified by somebody else,
    would not compile or cannot be written.
    """
    reports = inspect(patch, sglang)
    modified = [report.path for report in reports if report.state is State.MODIFIED]
    if modified:
        raise PatchError(
            f"{patch.name}: {sglang}: neither as published nor published plus diff: {', '.join(modified)}. Nothing was "
            f"changed. Undo the other change first: pip install --force-reinstall --no-deps sglang=={sglang.version}",
            EXIT_MODIFIED,
        )
    to_write = [report for report in reports if report.state is not goal]
    for report in to_write:
        try:
            compile(report.other, report.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise PatchError(f"{patch.name}: {report.path} would not compile: {error}. Nothing was changed.") from error
    if to_write and not dry_run:
        _replace_all({sglang.root / report.path: (report.content, report.other) for report in to_write})
        reached = overall(inspect(patch, sglang))
        if reached is not goal:
            raise PatchError(f"{patch.name}: wrote to {sglang}, but then found it {reached.value}", EXIT_MODIFIED)
    return [report.path for report in to_write]


def _replace_all(files: Mapping[Path, tuple[bytes, bytes]]) -> None:
    """Replaces the content, (old, new), of all files, or of none.

    Each file is replaced whole by a rename: nobody reads half a file, and a hard link into a package manager's cache is
    cut rather than written through. The new modification time makes Python compile the file again.
    """
    staged: dict[Path, Path] = {}
    replaced: list[Path] = []
    try:
        for path, (_, new) in files.items():
            staged[path] = _stage(path, new)
        for path, temporary in staged.items():
            os.replace(temporary, path)
            replaced.append(path)
    except OSError as error:
        _put_back({path: files[path][0] for path in replaced})
        raise PatchError(f"cannot write {error.filename}: {error.strerror}. Nothing was changed.") from error
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _put_back(files: Mapping[Path, bytes]) -> None:
    try:
        for path, content in files.items():
            os.replace(_stage(path, content), path)
    except OSError as error:
        message = f"cannot write {error.filename}: {error.strerror}. SGLang is left half changed: reinstall it."
        raise PatchError(message, EXIT_MODIFIED) from error


def _stage(path: Path, content: bytes) -> Path:
    """Writes `content` beside `path`, with its mode, ready for a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.prefixpack")
    try:
        temporary.write_bytes(content)
        shutil.copymode(path, temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
