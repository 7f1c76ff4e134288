"""The commands of README and docs: all of them, and one of them run as it stands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "patches/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.name != "CHANGELOG.md"
]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )?(?:python|make|pip|pytest|sgl-prefix-attn) [^`]+)`")
# Names of a command in a text, without its arguments.
NAMES = ("sgl_prefix_attn patch", "sgl_prefix_attn route fit", "pip install")


def blocks(*languages: str) -> list[Any]:
    """(page, code) of the fenced blocks in some languages."""
    found = [
        pytest.param(page, textwrap.dedent(code), id=f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, at) + 1}")
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for at, language, code in ((match.start(), *match.group(2, 3)) for match in BLOCK.finditer(text))
        if language in languages
    ]
    assert found
    return found


def commands_of(code: str) -> Iterator[str]:
    """Commands of a shell block: lines that end inside quotes or with a backslash go on."""
    command = ""
    for line in code.splitlines():
        command = f"{command}\n{line}" if command else line
        with contextlib.suppress(ValueError):
            shlex.split(command, comments=True)
            if not command.endswith("\\"):
                yield command.replace("\\\n", " ")
                command = ""
    assert not command, command


def shell_commands() -> list[Any]:
    """Every command of the pages, of console blocks, and in the text."""
    found: dict[str, str] = {}
    for case in blocks("bash", "console"):
        page, code = case.values
        if code.startswith("$ "):
            code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
        found |= dict.fromkeys(commands_of(code), page.name)
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        inline = (" ".join(command.split()) for command in INLINE.findall(text))
        found |= {command: page.name for command in inline if not command.endswith(NAMES)}
    return [pytest.param(command, id=f"{page}: {command[:60]}") for command, page in found.items() if command.strip()]


def documented(begin: str, replace: Mapping[str, object] = {}, more: str = "") -> str:
    """The longest command of the pages that begins so, with other words in place of some, and more at its end."""
    command = max((case.values[0] for case in shell_commands() if case.values[0].startswith(begin)), key=len)
    command = re.sub(r"\s+# .*", "", command).replace(" ... ", " ").removesuffix(" ...")
    for old, new in replace.items():
        assert old in command, command
        command = command.replace(old, str(new))
    return f"{command.strip()} {more}".strip()


def run(command: str, folder: Path = ROOT, **variables: str) -> str:
    """What a command prints in bash, with this Python as `python`. Fails unless its status is 0."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    words = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
