"""Finds an installed SGLang, its version and the hashes of its files as published, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sgl_prefix_attn.patching.errors import PatchError


@dataclass(frozen=True)
class Installation:
    """An SGLang on disk: `root` holds the package `sglang`.

    `hashes` has the sha256 of its files as published (urlsafe base64, from the wheel's RECORD); it is empty for an
    editable install and for a package without metadata.
    """

    root: Path
    version: str
    hashes: Mapping[str, str]

    def __str__(self) -> str:
        return f"sglang {self.version} in {self.root}"


def find_installation(sglang_path: str | None = None) -> Installation:
    """The SGLang that this Python would import, or the one under `sglang_path`.

    `sglang_path` is the folder that holds the package `sglang` (an unpacked wheel, a site-packages) or that package.
    PatchError when there is none or its version cannot be told.
    """
    root = _package_root(sglang_path)
    distribution = _distribution(root, editable=sglang_path is None)
    if distribution is not None:
        files = distribution.files or ()
        hashes = {str(file): file.hash.value for file in files if file.hash and file.hash.mode == "sha256"}
        return Installation(root, distribution.version, hashes)
    version_file = root / "sglang" / "_version.py"
    text = version_file.read_text("utf-8") if version_file.is_file() else ""
    match = re.search(r"^__version__ = .*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if match is None:
        raise PatchError(f"cannot tell the version of SGLang in {root}: neither metadata nor {version_file}")
    return Installation(root, match.group(1), {})


def _distribution(root: Path, editable: bool) -> importlib.metadata.Distribution | None:
    for distribution in importlib.metadata.distributions(path=[str(root)]):
        if distribution.metadata["Name"] == "sglang":
            return distribution
    try:  # an editable install has its metadata elsewhere
        return importlib.metadata.distribution("sglang") if editable else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_root(sglang_path: str | None) -> Path:
    if sglang_path is not None:
        given = Path(sglang_path).resolve()
        for package in (given / "sglang", given):
            if package.name == "sglang" and (package / "srt").is_dir():
                return package.parent
        raise PatchError(f"--sglang-path {sglang_path}: expected a folder with the package sglang in it")
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("SGLang is not installed for this Python; install it or give --sglang-path DIR")
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent
