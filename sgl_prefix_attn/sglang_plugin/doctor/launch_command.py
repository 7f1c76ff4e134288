"""A launch command as users paste it: variables, program and launch arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from sgl_prefix_attn.sglang_plugin.doctor.advice import arguments_without

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def launch_command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables and the launch arguments of a pasted command.

    Accepted are launch arguments alone, with variables before them, and a whole command that contains
    `sglang.launch_server` or `sglang serve`. The command may be one quoted word, with line continuations.

    Args:
        words: as the shell passed them.

    Returns:
        Variables set before the launch arguments, and the launch arguments.

    Raises:
        ValueError: something else comes before the launch arguments, or a quote is not closed.
    """
    if len(words) == 1:
        words = shlex.split(words[0].replace("\\\n", " "))
    # A backslash before a blank, where a line continuation was meant, is a blank word.
    words = [word for word in words if word.strip() not in ("", "\\", "--")]
    begin = _end_of_program(words)
    before, arguments = words[:begin], words[begin:]
    if begin == 0:
        begin = next((index for index, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
        before, arguments = words[:begin], words[begin:]
    if before[-1:] == ["serve"]:
        arguments = _arguments_of_serve(arguments)
    if arguments and not arguments[0].startswith("-"):
        raise ValueError(
            f"{arguments[0]!r} is no launch argument of SGLang; pass what follows `sglang.launch_server`, or the whole "
            "command"
        )
    return dict(word.split("=", 1) for word in before if _ASSIGNMENT.match(word)), arguments


def _end_of_program(words: Sequence[str]) -> int:
    """The index after the words that name SGLang's server program, 0 without any."""
    for index, word in enumerate(words):
        if word == "sglang.launch_server" or word.endswith("sglang/launch_server.py"):
            return index + 1
        if word == "serve" and index and words[index - 1].rpartition("/")[2] == "sglang":
            return index + 1
    return 0


def _arguments_of_serve(arguments: list[str]) -> list[str]:
    """Launch arguments of `sglang serve`, which takes the model without an option and a type of model."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model-path", *arguments]
    return arguments_without(arguments, ["--model-type"])
