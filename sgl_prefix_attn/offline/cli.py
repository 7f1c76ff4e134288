"""`python -m sgl_prefix_attn batch IN OUT --model MODEL`: a batch file in OpenAI's format, from start to end."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import shlex
import sys
from pathlib import Path

from sgl_prefix_attn.offline import token_batching
from sgl_prefix_attn.offline.engines import EngineArguments, EngineError, EnginePool, StartEngines
from sgl_prefix_attn.offline.identity import job_identity
from sgl_prefix_attn.offline.journal import JournalError, has_results, may_replace, unfinished
from sgl_prefix_attn.offline.progress import Progress
from sgl_prefix_attn.offline.ray_engines import RayEnginePool, RayMissingError, connect
from sgl_prefix_attn.offline.runner import BatchOptions, BatchSummary, journal_of, run_batch
from sgl_prefix_attn.offline.server_options import gpus_per_engine, has_tokenizer, read_options
from sgl_prefix_attn.offline.temporary import temporary_folder
from sgl_prefix_attn.settings import variable_name

# Conditions of the machine, not of the arguments: disk full, quota or limit of a file's size used up, disk broken.
_MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class UsageError(ValueError):
    """Unusable arguments; the message says what to change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the requests of a batch file (/v1/completions and /v1/chat/completions, OpenAI's format) offline. "
        "Requests that share a prefix run together, and the prefix is computed once. Run the same command again to "
        "continue a killed run. Exit status: 0 all requests succeeded; 1 some are in the errors file, an engine died, "
        "the disk is full or the journal is unusable; 2 unusable arguments."
    )
    parser.add_argument("input", type=Path, metavar="IN", help="batch file, one JSON request a line")
    parser.add_argument("output", type=Path, metavar="OUT", help="results, written when all requests are done")
    parser.add_argument("--model", required=True, help="model folder or name")
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="failed lines (default: OUT with .errors before its suffix)"
    )
    parser.add_argument("--ordered", action="store_true", help="results in the order of IN (default: as they finish)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT and errors file")
    parser.add_argument("--restart", action="store_true", help="discard what an interrupted run of OUT has finished")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="engines to run, each with its groups")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="run the engines on the machines of this Ray cluster (without ADDRESS: the one this machine belongs to)",
    )
    parser.add_argument(
        "--window", type=int, metavar="N", help="requests an engine has at once (512; with mixed steps by memory)"
    )
    parser.add_argument(
        "--token-batching",
        choices=token_batching.CHOICES,
        default="auto",
        help="prefills and decodes in one step, and requests by memory (auto: on a GPU, where such steps run packed)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--server-args", default="", help="more arguments for SGLang, as one quoted string")
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FOLDER",
        help="keep the engines' logs in this folder (with --ray: on each engine's machine)",
    )
    parser.add_argument("--no-grouping", action="store_true", help="leave order and admission to SGLang (to compare)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    # SGLang kills its processes, and Python's resource tracker warns about what they leave behind.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    try:
        if args.log is not None:
            return _run(args, args.log)
        with temporary_folder("prefixpack-batch-") as logs:
            return _run(args, logs)
    except (UsageError, RayMissingError, FileExistsError) as error:
        print(f"batch: {error}", file=sys.stderr)
        return 2
    except JournalError as error:
        print(f"batch: {error}", file=sys.stderr)
        return 1
    except (EngineError, OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) and error.filename is None else None
        print(f"batch: {told or error}", file=sys.stderr)
        _tell_of_results(journal_of(args.output))
        machine = isinstance(error, EngineError) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRORS)
        return 1 if machine else 2
    except KeyboardInterrupt:
        print("batch: interrupted", file=sys.stderr)
        _tell_of_results(journal_of(args.output))
        raise


def _tell_of_results(journal: Path) -> None:
    if has_results(journal):
        print(f"batch: what had finished is in {journal}; run the same command again to go on", file=sys.stderr)


def _run(args: argparse.Namespace, logs: Path) -> int:
    options = _options(args, logs)
    start = _start(args, options)
    from sgl_prefix_attn.offline import engine_process

    progress = Progress(enabled=not args.quiet)
    summary = run_batch(options, engine_process.main, progress, start)
    print(_report(summary, options))
    return 1 if summary.failed else 0


def _start(args: argparse.Namespace, options: BatchOptions) -> StartEngines:
    """The function that starts the engines, on this machine or on a Ray cluster."""
    if args.ray is None:
        return EnginePool
    gpus = gpus_per_engine(read_options(options.engines[0].arguments)) if _device(args) == "cuda" else 0
    return functools.partial(RayEnginePool, connect(args.ray), gpus=gpus)


def _options(args: argparse.Namespace, logs: Path) -> BatchOptions:
    for name, path in (("OUT", args.output), ("--errors", args.errors)):
        if path is not None and not path.name:  # as of "" and /
            raise UsageError(f"{name} {path}: expected the name of a file")
    if not args.model:
        raise UsageError("--model: expected a folder or a name")
    errors = args.errors or args.output.with_name(f"{args.output.stem}.errors{args.output.suffix}")
    for name, value in (("--engines", args.engines), ("--window", args.window)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: expected at least 1")
    if not args.input.is_file():
        raise UsageError(f"{args.input}: {'not a regular file' if args.input.exists() else 'no such file'}")
    _check_files(args.input, args.output, errors, args.overwrite)
    device = _device(args)
    logs.mkdir(parents=True, exist_ok=True)
    arguments = tuple(_server_arguments(args.model, args.server_args, device))
    # Models on a CPU are for tests; their matrices are too small for several threads.
    environment: tuple[tuple[str, str], ...] = ()
    if device == "cpu":
        environment = (("SGLANG_USE_CPU_ENGINE", "1"), ("OMP_NUM_THREADS", "1"))
    if args.no_grouping:
        environment += ((variable_name("group_scheduling"), "0"),)
    server = read_options(arguments)
    engines = []
    for number in range(args.engines):
        log = logs / f"engine-{number}.log"
        more = (
            ("--base-gpu-id", str(server.base_gpu_id + number * gpus_per_engine(server) * server.gpu_id_step))
            if device == "cuda" and args.engines > 1 and args.ray is None  # Ray assigns the GPUs
            else ()
        )
        engines.append(EngineArguments(arguments + more, environment, log, keep_log=args.log is not None))
    return BatchOptions(
        source=args.input,
        output=args.output,
        errors=errors,
        model=args.model,
        engines=tuple(engines),
        ordered=args.ordered,
        window=args.window,
        batching=args.token_batching,
        grouped=not args.no_grouping,
        overwrite=args.overwrite,
        job=job_identity(arguments, server.model_path),
        restart=args.restart,
    )


def _check_files(source: Path, output: Path, errors: Path, overwrite: bool) -> None:
    """Raises UsageError if the run would replace or delete a file that it was not asked to replace."""
    files = {
        "IN": source,
        "OUT": output,
        "the errors file": errors,
        "the journal": journal_of(output),
        "OUT while it is written": unfinished(output),
        "the errors file while it is written": unfinished(errors),
    }
    names: dict[Path, str] = {}
    for name, path in files.items():
        other = names.setdefault(path.resolve(), name)
        if other != name:
            raise UsageError(f"{path} is both {other} and {name}; IN, OUT and errors must be three different files")
    # With a journal next to it, OUT belongs to this job.
    journal = files["the journal"]
    for path, is_the_jobs in ((output, journal.exists()), (errors, may_replace(journal, errors))):
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent}: no such folder")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file")
        if path.exists() and not (overwrite or is_the_jobs):
            raise UsageError(f"{path} exists; --overwrite replaces it")


def _server_arguments(model: str, text: str, device: str) -> list[str]:
    from sgl_prefix_attn.offline.config_file import with_config_file

    # The file's arguments are read here: they decide about GPUs and prompts, and the defaults leave them alone.
    try:
        more = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--server-args {text!r}: {error}") from error
    own = read_options(more)
    if own.model_path is not None or (own.device or device) != device:
        raise UsageError("--server-args: give the model and the device as --model and --device of this command")
    given = with_config_file(["--model-path", model, *more])
    defaults = {"--device": device, "--attention-backend": "prefixpack", "--log-level": "warning"}
    if device == "cpu":
        defaults["--dtype"] = "float32"
        given.append("--disable-cuda-graph")
    options = read_options(given)
    if not has_tokenizer(options.tokenizer_path or options.model_path):
        given.append("--skip-tokenizer-init")
    # SGLang takes the last of several, and also the begin of an option's name.
    return [word for option in defaults.items() for word in option] + given


def _device(args: argparse.Namespace) -> str:
    if args.device:
        return str(args.device)
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _report(summary: BatchSummary, options: BatchOptions) -> str:
    done = summary.requests - summary.failed
    lines = [f"{done} of {summary.requests} requests succeeded: {options.output}"]
    if summary.resumed:
        lines.append(f"{summary.resumed} of them had been finished by earlier runs")
    if summary.failed:
        lines.append(f"{summary.failed} failed: {options.errors}")
    if summary.output_tokens:
        lines.append(
            f"{summary.prompt_tokens} prompt and {summary.output_tokens} output tokens in {summary.seconds:.1f} s"
        )
        if summary.single_tokens:
            lines[-1] += (
                f"; {summary.saving:.1%} of prompt tokens came from the cache, {summary.possible_saving:.1%} are shared"
            )
    lines += token_batching.report(summary.engines, summary.window, summary.steps)
    lines += [f"SGLang has no field {name}: {count} requests ran without it" for name, count in summary.ignored.items()]
    return "\n".join(lines)
