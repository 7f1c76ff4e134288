"""A temporary folder that is removed when its process ends, also when the process is killed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

# The shell waits for the end of its input: the pipe closes when this process closes it or ends for any reason.
_REMOVE_AT_END = 'cat > /dev/null; rm -rf -- "$1"'


class RemovedAtEnd:
    """Removes a folder when this process ends. A context manager; leaving it removes the folder at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE_AT_END, "sh", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C in a terminal does not reach it
        )

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, *exception: object) -> None:
        self._remover.communicate()


def temporary_folder(prefix: str) -> RemovedAtEnd:
    """A new folder in the system's folder for temporary files.

    Raises:
        OSError: it cannot be created.
    """
    return RemovedAtEnd(Path(tempfile.mkdtemp(prefix=prefix)))
