"""What two runs of a batch have in common if they are the same job: the engine's arguments and the model's files."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

# Arguments of the machine. They change no token, and may change from one run to the next, as the number of engines.
_OF_THE_MACHINE = frozenset(
    {"--base-gpu-id", "--gpu-id-step", "--log-level", "--mem-fraction-static", "--nccl-port", "--port"}
)
_SECRETS = ("--admin-api-key", "--api-key", "--ssl-keyfile-password")  # an engine refuses them, after the journal began
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".py")  # configs, tokenizer, template, code
_MOST_HEADER = 1 << 27  # bytes of a safetensors header


def job_identity(arguments: Sequence[str], folder: str) -> dict[str, str]:
    """By a name for the user: the engine's arguments, and a fingerprint of each model file of the folder, if it is one.

    Other files, as those that the batch itself writes, do not count. Nor does a slash behind the folder. Of weights it
    has the size, and the header where they are safetensors: reading terabytes would take hours.
    """
    is_folder = os.path.isdir(folder)
    shared, left = [], iter(arguments)
    for argument in left:
        name, equals, _ = argument.partition("=")
        if name in _OF_THE_MACHINE or _may_be_secret(name):
            if not equals:
                next(left, None)
        else:
            shared.append(os.path.normpath(folder) if is_folder and argument == folder else argument)
    identity = {"the engine's arguments": shlex.join(shared)}
    if is_folder:
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in (*_READ_WHOLE, *_WEIGHTS) and path.is_file():
                identity[f"the model's {path.name}"] = _fingerprint(path)
    return identity


def _may_be_secret(name: str) -> bool:
    """Whether an option is one that nobody else may read, also if it is abbreviated."""
    return len(name) > 4 and any(secret.startswith(name) for secret in _SECRETS)


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
