"""Arguments and output of `python -m sgl_prefix_attn doctor`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import io
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sgl_prefix_attn import __version__
from sgl_prefix_attn.gpus import KnownGpu, known_gpus
from sgl_prefix_attn.settings import CONFIG_VARIABLE, OTHER_VARIABLES, PREFIX, SettingsError, load_settings
from sgl_prefix_attn.sglang_plugin.doctor import model_path
from sgl_prefix_attn.sglang_plugin.doctor.launch_command import launch_command

if TYPE_CHECKING:
    from sgl_prefix_attn.sglang_plugin.doctor.diagnosis import Answer, Diagnosis

# All that this command does not know are launch arguments of SGLang.
TAKES_MORE = True
_STEPS = {"decode": "decode", "extend": "prefill", "mixed": "mixed", "verify": "verify"}
_WAYS = {
    "name": "under the name prefixpack",
    "wrap": "wrap mode",
    "off": "prefixpack does not run",
}
_BY_HAND = (
    "     By hand, for example in the file of --config or PREFIXPACK_CONFIG: changes of the given arguments and\n"
    "     variables are not enough."
)
_NAME = "prefixpack"
_UNUSABLE = 2  # exit status
_OWN_OPTIONS = ("--json", "--gpu", "--reasons", "--verbose")
_NO_GPU = "\nNo GPU is here: for a server on another machine add --gpu, for example --gpu h200; on a CPU --device cpu"
_WRAP_INSTEAD = (
    f"\nSGLang takes only certain names of backends for some models: leave out {_NAME}, name one of those if need be, "
    "and set PREFIXPACK_WRAP=1"
)
_EXAMPLES = """examples:
  %(prog)s --model-path Qwen/Qwen3-8B
      with the variables of this shell, as for python -m sglang.launch_server --model-path Qwen/Qwen3-8B
  PREFIXPACK_WRAP=1 %(prog)s --json --model-path /models/gpt-oss --attention-backend fa3
      the same as JSON, with wrap mode on
  %(prog)s PREFIXPACK_WRAP=1 python -m sglang.launch_server --model-path Qwen/Qwen3-8B
      a whole launch command, with its variables; `sglang serve ...` likewise

  %(prog)s --gpu h200 'nohup python -m sglang.launch_server --model-path $MODEL > log 2>&1 &'
      a line of a script in quotes, answered on any machine as an H200's would; redirections and comments are left out

Exit status: 0: some steps would run packed. 1: none would. 2: unusable arguments or settings.
It looks at the installed SGLang, the variables, and the GPU of this machine unless --gpu names another.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say which steps and layers of a server would run packed, which would not and why, and what to change. "
        "Reads SGLang's launch arguments and the environment; starts no server and loads no weights."
    )
    parser.usage = (
        "%(prog)s [-h] [--json] [--gpu NAME] [--reasons] [--verbose] "
        "[launch arguments of SGLang, or the whole command ...]"
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--gpu", metavar="NAME", type=_known_gpu, help=f"answer as a machine with this GPU: {', '.join(known_gpus())}"
    )
    parser.add_argument("--verbose", action="store_true", help="print what SGLang says meanwhile, to stderr")
    parser.add_argument("--reasons", action="store_true", help="print every fallback reason and what to do about it")


def _known_gpu(name: str) -> KnownGpu:
    found = known_gpus().get(name.lower().replace("nvidia ", "").replace(" ", ""))
    if found is None:
        hint = _did_you_mean(name.lower(), known_gpus())
        raise argparse.ArgumentTypeError(f"unknown GPU {name!r}{hint}; known are {', '.join(known_gpus())}")
    return found


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def run(args: argparse.Namespace) -> int:
    if args.reasons:
        from sgl_prefix_attn.sglang_plugin.doctor.advice import markdown

        print(markdown())
        return 0
    try:
        variables, arguments = launch_command(args.more)
    except ValueError as error:
        return _unusable(str(error))
    environ = {**os.environ, **variables}
    if importlib.util.find_spec("sglang") is None:
        return _unusable("SGLang is not installed in this environment")
    names = [argument.partition("=")[0] for argument in arguments]
    if not {"--model-path", "--model", "--config"} & set(names):
        near = difflib.get_close_matches("--model-path", names, 1)
        meant = f"; {near[0]}: did you mean --model-path?" if near else "; see --help"
        return _unusable(f"no --model-path among the launch arguments{meant}")
    if "--gpu" in names:  # SGLang would take it for an abbreviation of an option of its own
        return _unusable("--gpu is an option of the doctor: put it before the launch line, outside of its quotes")
    missing = model_path.problem(arguments, environ)
    if missing is not None:
        return _unusable(missing)
    printed = io.StringIO()
    # SGLang and its libraries print while they are imported, and all of SGLang's options beside a mistake.
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        status, text = _answer_in_silence(args, arguments, environ, variables, printed)
    if args.verbose:
        sys.stderr.write(printed.getvalue())
    if status == _UNUSABLE:
        return _unusable(text)
    print(text)
    return status


def _answer_in_silence(
    args: argparse.Namespace,
    arguments: list[str],
    environ: Mapping[str, str],
    variables: Mapping[str, str],
    printed: io.StringIO,
) -> tuple[int, str]:
    """The exit status, and the text to print: the diagnosis, or why there is none."""
    from sgl_prefix_attn.sglang_plugin.compat import versions

    version = versions.installed_version()
    try:
        versions.check_supported(version, allow_untested=load_settings(environ).allow_untested_sglang)
        from sgl_prefix_attn.sglang_plugin.doctor import diagnosis

        found = diagnosis.diagnose(arguments, environ, args.gpu)
    except (SettingsError, versions.UnsupportedSglangError) as error:
        return _UNUSABLE, str(error)
    except SystemExit as stop:  # of SGLang's parser
        if not stop.code:
            return 0, printed.getvalue()  # --help among the arguments
        return _UNUSABLE, f"SGLang does not accept the arguments: {_complaint(printed.getvalue())}"
    except Exception as error:  # whatever SGLang has against the arguments, with an exception of its choice
        decided = args.gpu or any(argument.split("=")[0] == "--device" for argument in arguments)
        hint = "" if decided or diagnosis.gpu_facts() else _NO_GPU
        if "attention backend" in str(error) and any(argument.rpartition("=")[2] == _NAME for argument in arguments):
            hint += _WRAP_INSTEAD
        return _UNUSABLE, f"SGLang does not accept the arguments: {type(error).__name__}: {error}{hint}"
    gpu = diagnosis.gpu_facts() if args.gpu is None else _facts_of(args.gpu)
    status = 0 if found.packs else 1
    if args.json:
        facts = {"version": 1, "sglang": version, "package": __version__, "gpu": gpu}
        return status, json.dumps({**facts, **as_dict(found)}, indent=2)
    text = as_text(found, arguments, environ, variables)
    return status, f"SGLang {version}, sgl-prefix-attn {__version__}, {_gpu_text(gpu)}\n{text}"


def _complaint(printed: str) -> str:
    """What SGLang's parser has against the arguments, with similar options for those that it does not know."""
    from sgl_prefix_attn.sglang_plugin.doctor.advice import targets_of_options

    problem = printed.rpartition("error: ")[2].strip()
    _, unknown, words = problem.partition("unrecognized arguments: ")
    options = [word.partition("=")[0] for word in words.split() if unknown and word.startswith("--")]
    known = (*targets_of_options(), *_OWN_OPTIONS)
    return problem + "".join(f"\n  {option}{hint}" for option in options if (hint := _did_you_mean(option, known)))


def _facts_of(gpu: KnownGpu) -> dict[str, Any]:
    return {"name": gpu.name, "capability": list(gpu.capability), "assumed": True}


def _unusable(message: str) -> int:
    print(f"doctor: {message}", file=sys.stderr)
    return _UNUSABLE


def as_dict(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis as JSON-able values."""
    return {
        "model": found.model,
        "device": found.device,
        "kernels": found.kernels,
        "backends": dict(zip(("prefill", "decode"), found.backends, strict=True)),
        "way": found.way,
        "packs": found.packs,
        "kv_hints": {"read": found.hints is None, "why": found.hints},
        "steps": {_STEPS[mode]: _answer(answer) for mode, answer in found.steps.items()},
        "layers": [{"layers": layers, **_answer(answer)} for layers, answer in found.layers],
        "changes": [change.as_dict() for change in found.changes],
        "after_changes": None if found.after is None else as_dict(found.after),
    }


def _answer(answer: Answer) -> dict[str, Any]:
    key, why = (None, None) if answer.reason is None else (answer.reason.key, answer.reason.text)
    return {"packed": key is None, "reason": key, "why": why, "note": answer.note}


def as_text(
    found: Diagnosis, arguments: list[str], environ: Mapping[str, str], given: Mapping[str, str] | None = None
) -> str:
    """A diagnosis for people.

    Args:
        found: the diagnosis.
        arguments: launch arguments.
        environ: variables of the server's process.
        given: those of them that come before the launch arguments.
    """
    prefill, decode = found.backends
    backends = str(decode) if prefill == decode else f"{prefill} for prefill, {decode} for decode"
    no_settings = set(OTHER_VARIABLES) - {CONFIG_VARIABLE}
    set_here = sorted(name for name in environ if name.startswith(PREFIX) and name not in no_settings)
    lines = [
        f"Model: {', '.join(found.model)} on {found.device}",
        f"Attention backend: {backends}; {_WAYS[found.way]}",
        *([f"Kernels: {found.kernels}"] if found.kernels else []),
        f"KV hints and sessions: {'read' if found.hints is None else f'not read: {found.hints}'}",
        f"Variables: {', '.join(f'{name}={environ[name]}' for name in set_here) or 'none of ours'}",
        "",
        "Steps",
        *(f"  {_STEPS[mode]:8} {_line(answer)}" for mode, answer in found.steps.items()),
    ]
    if found.layers:
        lines.append("Layers in packed steps")
        lines += [f"  {layers}: {' '.join(_line(answer).split())}" for layers, answer in found.layers]
    if found.changes:
        lines.append("What to change")
        for number, change in enumerate(found.changes, 1):
            lines += [f"  {number}. {change.reason.advice}", *([_BY_HAND] if change.by_hand else [])]
    if found.after is not None:
        packed = [_STEPS[mode] for mode, answer in found.after.steps.items() if answer.reason is None]
        lines.append(f"  Then packed: {', '.join(packed) or 'nothing'}.")
        lines.append(f"  Launch: {_launch_after(found, arguments, environ, given or {})}")
    if not found.packs and not found.changes:
        lines.append("There is nothing to change: this server cannot run packed.")
    return "\n".join([*lines, "", f"Launch arguments: {shlex.join(arguments)}"])


def _launch_after(found: Diagnosis, arguments: list[str], environ: Mapping[str, str], given: Mapping[str, str]) -> str:
    """The command of the server after the changes, for a shell with the variables of `environ` that are not `given`."""
    after = dict(given)
    unset = [name for change in found.changes for name in change.reason.unset if name in environ and name not in given]
    for change in found.changes:
        arguments, after = change.followed(arguments, after)
    begin = ["env", *(f"-u {name}" for name in unset)] if unset else []
    changed = [f"{name}={shlex.quote(value)}" for name, value in sorted(after.items())]
    return " ".join([*begin, *changed, "python -m sglang.launch_server", shlex.join(arguments)])


def _line(answer: Answer) -> str:
    if answer.reason is None:
        return f"packed{f', {answer.note}' if answer.note else ''}"
    if answer.note:
        return f"-        {answer.reason.text} ({answer.note})"
    return f"stock    {answer.reason.key}: {answer.reason.text}"


def _gpu_text(gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return "no GPU"
    assumed = ", assumed" if gpu.get("assumed") else ""
    return f"{gpu['name']} (compute capability {'.'.join(map(str, gpu['capability']))}{assumed})"
