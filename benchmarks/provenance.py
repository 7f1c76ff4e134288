"""Which code a result comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """HEAD of the checkout that this file lies in; None without one."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
