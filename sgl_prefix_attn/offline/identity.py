"""What two runs of a batch have in common if they are the same job: the engine's arguments and the model's files."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

# Engines differ in it, and their number may change from one run to the next.
_OF_AN_ENGINE = "--base-gpu-id"
_READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".py")  # configs, tokenizer, template, code
_MOST_HEADER = 1 << 27  # bytes of a safetensors header


def job_identity(arguments: Sequence[str], folder: str) -> dict[str, str]:
    """By a name for the user: the engine's arguments, and a fingerprint of each file of the folder (if it is one).

    Of weights it has the size, and the header where they are safetensors: reading terabytes would take hours.
    """
    shared = list(arguments)
    if _OF_AN_ENGINE in shared:
        at = shared.index(_OF_AN_ENGINE)
        del shared[at : at + 2]
    identity = {"the engine's arguments": shlex.join(shared)}
    if os.path.isdir(folder):
        for path in sorted(Path(folder).iterdir()):
            if path.is_file():
                identity[f"the model's {path.name}"] = _fingerprint(path)
    return identity


def _fingerprint(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if path.suffix in _READ_WHOLE:
            while block := file.read(1 << 20):
                digest.update(block)
        elif path.suffix == ".safetensors":
            length = file.read(8)
            digest.update(length + file.read(min(int.from_bytes(length, "little"), _MOST_HEADER)))
    return f"{size} bytes, {digest.hexdigest()[:16]}"
