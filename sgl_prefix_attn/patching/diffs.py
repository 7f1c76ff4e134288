"""The diffs in `patches/VERSION/NAME.patch`, their SGLang versions and their reasons.

Paths in a diff are relative to the folder that holds the package `sglang`. A header of `Key: value` lines names the
published versions that the diff fits line by line (`Versions`), what it adds (`Summary`) and why (`Reason`). Diffs of
one version touch different files, so that each can be applied and reverted alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import patch_ng

from sgl_prefix_attn.patching.errors import PatchError


@dataclass(frozen=True)
class SeamPatch:
    """One diff: `files` are its paths below the folder that holds the package `sglang`."""

    name: str
    versions: tuple[str, ...]
    summary: str
    reason: str
    files: tuple[str, ...]
    diff: patch_ng.PatchSet


def patch_folder() -> Path:
    """Folder of the diffs: inside the package when installed, beside it in a source checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "patches", package.parent / "patches"):
        if any(folder.glob("*/*.patch")):
            return folder
    raise PatchError(f"no patches/*/*.patch in {package} or {package.parent}: reinstall sgl-prefix-attn")


def load_patches(folder: Path | None = None) -> list[SeamPatch]:
    """All diffs, ordered by name and version. PatchError when one of them cannot be parsed."""
    patches = [_load(path) for path in (folder or patch_folder()).glob("*/*.patch")]
    return sorted(patches, key=lambda patch: (patch.name, version_key(patch.versions[0])))


def _load(path: Path) -> SeamPatch:
    text = path.read_bytes()
    header = Parser().parsestr(text.partition(b"\n--- ")[0].decode("utf-8"))
    missing = [key for key in ("Versions", "Summary", "Reason") if not header[key]]
    diff = patch_ng.fromstring(text)
    if missing or not diff:
        raise PatchError(f"{path}: {'no ' + ', '.join(missing) if missing else 'not a unified diff'}")
    return SeamPatch(
        name=path.stem,
        versions=tuple(header["Versions"].split()),
        summary=" ".join(header["Summary"].split()),
        reason=" ".join(header["Reason"].split()),
        files=tuple(item.target.decode("utf-8").removeprefix("b/") for item in diff),
        diff=diff,
    )


def patches_for(version: str, patches: list[SeamPatch]) -> list[SeamPatch]:
    """The diffs that fit `version` exactly; its local part ("+cu129") is ignored. PatchError if none does."""
    fitting = [patch for patch in patches if version.partition("+")[0] in patch.versions]
    if not fitting:
        known = " ".join(sorted({known for patch in patches for known in patch.versions}, key=version_key))
        raise PatchError(f"there is no diff for sglang {version}; there are diffs for {known}")
    return fitting


def version_key(version: str) -> list[int]:
    """Sort key of published versions: 0.5.9 < 0.5.15 < 0.5.15.post1 < 0.5.16."""
    return [int(number) for number in re.findall(r"\d+", version)]
