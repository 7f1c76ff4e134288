"""Exit statuses of the patch command, and the error that carries one."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_NOT_APPLIED = 1
EXIT_UNUSABLE = 2
EXIT_MODIFIED = 3


class PatchError(Exception):
    """A patch command fails. The message gives the reason and the remedy; `status` is the exit status."""

    def __init__(self, message: str, status: int = EXIT_UNUSABLE) -> None:
        super().__init__(message)
        self.status = status
