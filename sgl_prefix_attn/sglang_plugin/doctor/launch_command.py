"""A launch command as users paste it: variables, program and launch arguments."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SHELL = re.compile(r"(?:\S*/)?(?:ba|z|da|k)?sh")
_RUNNERS = frozenset({"command", "env", "exec", "export", "nohup", "setsid", "time"})
_DUPLICATE = r"\d*[<>]&(?:\d+|-)"  # 2>&1
_REDIRECT = r"(?:\d+|&)?(?:>>|>\||<<<|<>|>&|<&|<|>)"  # before the name of its file
_END = r"&&|\|\||\|&|[;|&\n()]"  # and where the text of a subshell begins or ends
_INNER = r"\$\((?:[^()]|\([^()]*\))*\)"  # the output of a command
_PIECES = r"""\\.|\$'(?:\\.|[^'\\])*'|'[^']*'|\$?"(?:\\.|[^"\\])*"|"""  # of a word, with quotes or a backslash
_TOKEN = re.compile(
    rf"(?P<blank>[ \t]+)|(?P<comment>\#[^\n]*)|(?P<duplicate>{_DUPLICATE}(?![^\s;&|<>]))|(?P<redirect>{_REDIRECT})"
    rf"|(?P<end>{_END})|(?P<word>(?:{_PIECES}{_INNER}|[^\s'\"\\;&|<>()])+)",
    re.DOTALL,
)
_OPERATOR = re.compile(rf"{_DUPLICATE}|{_REDIRECT}|{_END}|(?:\d+|&)?>>?[^<>]+")
_PIECE = re.compile(rf"{_PIECES}(?:[^'\"\\$]|\$(?!['\"]))+", re.DOTALL)
_VALUE = re.compile(r"""\\([\\"$`])|\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::-([^{}$`]*))?\})|(`|\$[({@*\#?\d])""")

# Options that change nothing of the answer: scripts often take their values from variables.
_OF_NO_EFFECT = frozenset({"--admin-api-key", "--api-key", "--host", "--nccl-port", "--port", "--served-model-name"})


def launch_command(words: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[dict[str, str], list[str]]:
    """The variables and the launch arguments of a pasted command.

    Accepted are launch arguments alone, with variables before them, and a whole command that contains
    `sglang.launch_server` or `sglang serve`. The command may be one quoted word as it stands in a script: with line
    continuations, comments, redirections, other commands around it, variables, and as the text of `sh -c`.

    Args:
        words: as the shell passed them.
        environ: variables that the command may name; those of this process if None.

    Returns:
        Variables set before the launch arguments, and the launch arguments.

    Raises:
        ValueError: something else comes before the launch arguments, a quote is not closed, or a shell's expression
            has no known value.
    """
    text = words[0] if len(words) == 1 else _text(words)
    return _of_text(text, os.environ if environ is None else environ)


def _text(words: Sequence[str]) -> str:
    """Words that a shell has split, as text. They may hold the operators of another shell."""
    end = words.index("#") if "#" in words else len(words)
    return " ".join(word if _OPERATOR.fullmatch(word) else shlex.quote(word) for word in words[:end])


def _of_text(text: str, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    variables: dict[str, str] = {}
    found: list[str] = []
    for command in _commands(text.replace("\r\n", "\n").replace("\\\n", " ")):
        try:
            expanded = _words(command, {**environ, **variables})
        except ValueError:
            if "sglang" in " ".join(command) or command[0].startswith("-"):
                raise
            continue
        # A backslash before a blank, where a line continuation was meant, is a blank word.
        words = [word for word in expanded if word.strip() not in ("", "\\", "--")]
        inner = _text_of_shell(words)
        if inner is not None:
            variables.update(_assignments(words[: words.index(inner)]))
            inside, found = _of_text(inner, {**environ, **variables})
            return {**variables, **inside}, found
        if _end_of_program(words):
            found = words
            break
        if not _without_runners(words):
            variables.update(_assignments(words))  # for the commands after it
        found = found or words
    begin = _end_of_program(found)
    arguments = found[begin:] if begin else _without_runners(found)
    before = found[: len(found) - len(arguments)]
    if before[-1:] == ["serve"]:
        arguments = _arguments_of_serve(arguments)
    if arguments and not arguments[0].startswith("-"):
        raise ValueError(
            f"{arguments[0]!r} is no launch argument of SGLang; pass what follows `sglang.launch_server`, or the whole "
            "command"
        )
    return {**variables, **_assignments(before)}, arguments


def _assignments(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if _ASSIGNMENT.match(word))


def _without_runners(words: Sequence[str]) -> list[str]:
    """A command without assignments and programs that run another, at its beginning."""
    others = (index for index, word in enumerate(words) if word not in _RUNNERS and not _ASSIGNMENT.match(word))
    return list(words[next(others, len(words)) :])


def _text_of_shell(words: Sequence[str]) -> str | None:
    """The command that a shell among words is to run, if it names SGLang."""
    for shell, option, text in zip(words, words[1:], words[2:], strict=False):
        if _SHELL.fullmatch(shell) and re.fullmatch(r"-[a-z]*c", option) and "sglang" in text:
            return text
    return None


def _commands(text: str) -> Iterator[list[str]]:
    """The commands of a script, as words that are not yet expanded, without redirections and comments."""
    command: list[str] = []
    is_file = False  # of a redirection
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            if text[at:].strip() == "\\":  # a line continuation without a next line
                break
            raise ValueError(f"a quote is not closed: {text[at:][:40]!r}")
        at, kind = token.end(), token.lastgroup
        if kind == "end":
            if command:
                yield command
            command = []
        elif kind == "word" and not is_file:
            command.append(token.group())
        if kind != "blank":
            is_file = kind == "redirect"
    if command:
        yield command


def _words(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The words of a command as a shell expands them. What has no known value and no effect is left out.

    Raises:
        ValueError: another expression has no known value.
    """
    words: list[str] = []
    for word in command:
        try:
            words += _expanded(word, variables)
        except ValueError:
            if word.partition("=")[0] in _OF_NO_EFFECT:
                continue
            if not words or words[-1] not in _OF_NO_EFFECT:
                raise
            words.pop()
    return words


def _expanded(word: str, variables: Mapping[str, str]) -> list[str]:
    """The words that a shell makes of one, without its quotes and with the values of variables.

    Raises:
        ValueError: an expression has no known value.
    """

    def value(found: re.Match[str]) -> str:
        escaped, plain, braced, default, unknown = found.groups()
        if escaped:
            return escaped
        if unknown:
            raise ValueError(f"{word}: the doctor does not run a shell; write the value")
        known = variables.get(plain or braced, default)
        if known is None:
            raise ValueError(f"{word}: {plain or braced} is not set here; set it, or write its value")
        return known

    pieces = []
    if word.startswith("~/") and "HOME" in variables:
        pieces.append(variables["HOME"])
        word = word[1:]
    for piece in _PIECE.findall(word):
        if piece[0] == "'":
            pieces.append(piece[1:-1])
        elif piece[0] == "\\":
            pieces.append(piece[1:])
        elif piece.startswith("$'"):
            pieces.append(piece[2:-1].encode("latin-1", "backslashreplace").decode("unicode_escape"))
        else:
            quoted = piece.startswith(('"', '$"'))
            pieces.append(_VALUE.sub(value, piece.removeprefix("$")[1:-1] if quoted else piece))
    is_split = "$" in word and not _ASSIGNMENT.match(word) and not set(word) & set("'\"\\")
    return "".join(pieces).split() if is_split else ["".join(pieces)]


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


def arguments_without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Launch arguments without some options and their values."""
    kept: list[str] = []
    leave_out = False
    for argument in arguments:
        if argument.startswith("--"):
            option = argument.partition("=")[0]
            leave_out = any(option == name or (name.endswith("-") and option.startswith(name)) for name in names)
        if not leave_out:
            kept.append(argument)
    return kept
