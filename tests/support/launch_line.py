"""A server that is started by a launch line of the pages."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from pathlib import Path

from sgl_prefix_attn.demo.server import ServerOptions, Starter
from tests.support import forked_server


@dataclasses.dataclass(frozen=True)
class LaunchLine(ServerOptions):
    words: tuple[str, ...] = ()

    def command(self, port: int, nccl_port: int | None = None) -> list[str]:
        return [sys.executable, *self.words, "--port", str(port), "--nccl-port", str(nccl_port)]

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def launch_line(
    line: str, folder: Path, *more: str, starter: Starter = forked_server.start, **variables: str
) -> LaunchLine:
    """The server of `NAME=VALUE python -m sglang.launch_server ...`, with more arguments, and its log in a folder."""
    words = shlex.split(line.replace("\\\n", " "))
    named = [word for word in words if re.match(r"[A-Z_]+=", word)]
    assert words[len(named)] == "python"
    environment = {**dict(word.split("=", 1) for word in named), **variables}
    arguments = (*words[len(named) + 1 :], *more)
    return LaunchLine("", None, environment=environment, log_folder=folder, starter=starter, words=arguments)
