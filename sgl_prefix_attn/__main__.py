"""Command line: `python -m sgl_prefix_attn COMMAND`, or `sgl-prefix-attn COMMAND`."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from sgl_prefix_attn import __version__

# command: (module with add_arguments(parser) and run(args) -> exit status, one-line help)
COMMANDS = {
    "abtest": ("sgl_prefix_attn.abtest.cli", "compare routing policies, over measured steps or live on a server"),
    "batch": ("sgl_prefix_attn.offline.cli", "run a batch file (OpenAI's format) offline, prefixes computed once"),
    "demo": ("sgl_prefix_attn.demo.cli", "serve a workload with prefixpack and with the stock backend, and compare"),
    "doctor": ("sgl_prefix_attn.sglang_plugin.doctor.cli", "say what of a server would run packed, and what to change"),
    "explain": ("sgl_prefix_attn.explain.cli", "show forest, packs, KV reads and balance of a batch"),
    "setup-cpu": ("sgl_prefix_attn.installer.cli", "install SGLang for CPUs into this environment, for a trial"),
    "settings": ("sgl_prefix_attn.settings_cli", "show every setting, its value and where that came from"),
    "tiny-model": ("sgl_prefix_attn.demo.model_cli", "write a model of random weights, which needs no hub"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0 done, 1 failed, 2 unusable arguments or settings."""
    _open_closed_streams()
    try:
        status = _run(_with_values(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_output()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"cannot write: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _open_closed_streams() -> None:
    """Opens /dev/null for standard streams that the shell has closed: else a file of ours gets the number of one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)  # None, if it was closed
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _discard_output() -> None:
    """Lets the interpreter's own flush at its end succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl-prefix-attn" if os.path.basename(sys.argv[0]) == "sgl-prefix-attn" else "python -m sgl_prefix_attn",
        description="Shared-prefix attention for SGLang: tools around `--attention-backend prefixpack`.",
        epilog="COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    takes_more = False  # whether the command takes arguments that are not ours
    for name, (module_name, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary)
        # Only the chosen command is imported: `settings` must not need torch, `explain` not SGLang.
        if name in arguments[:1]:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
            takes_more = getattr(module, "TAKES_MORE", False)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f", did you mean {near[0]}?" if near else "."
        parser.error(f"there is no command {arguments[0]!r}{hint} There are {', '.join(COMMANDS)}")
    args, more = parser.parse_known_args(arguments)
    if more and not takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    args.more = more
    from sgl_prefix_attn.settings import misnamed_variables  # after the arguments: it takes a moment

    for warning in misnamed_variables():
        print(warning, file=sys.stderr)
    status: int = args.run(args)
    return status


def _with_values(argv: Sequence[str]) -> list[str]:
    """The arguments, with `--server-args --flag` as one: argparse would take the flag for an option of ours."""
    arguments: list[str] = []
    for argument in argv:
        if arguments and arguments[-1] == "--server-args":
            arguments[-1] += f"={argument}"
        else:
            arguments.append(argument)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
