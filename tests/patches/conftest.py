from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.patching.diffs import load_patches, patches_for
from tests.support.wheels import WheelUnavailableError, published_source, unpack


@dataclass(frozen=True)
class UnpackedWheel:
    """What the patch command needs of a published wheel: its metadata and the files that the diffs touch."""

    version: str
    root: Path
    files: tuple[str, ...]

    def patch(self, action: str, *options: str) -> int:
        return main(["patch", action, "--sglang-path", str(self.root), *options])

    def contents(self) -> dict[str, bytes]:
        """Every file below `root` except compiled ones."""
        paths = [path for path in sorted(self.root.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}


def unpacked_wheel(version: str, folder: Path) -> UnpackedWheel:
    """The published wheel of `version` in `folder`; the test is skipped when it cannot be fetched."""
    try:
        wheel = published_source(version)
    except WheelUnavailableError as reason:
        pytest.skip(str(reason))
    files = tuple(file for patch in patches_for(version, load_patches()) for file in patch.files)
    return UnpackedWheel(version, unpack(wheel, folder, [*files, "sglang/_version.py"]), files)
