"""Scheduler processes of launchers that never load SGLang's plug-ins.

SGLang's own `run_scheduler_process` loads them first. A launcher may pass an entry function of its own instead, as
AReaL does. With `--use-ray`, schedulers are Ray actors, which load none either. This module runs in both processes, so
it imports nothing of SGLang at its top.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

_SGLANG = "sglang."
_SETTINGS = "PREFIXPACK_"


def around_launch_scheduler_processes(
    original: Callable[..., Any],
    cls: type,
    server_args: Any,
    port_args: Any,
    run_scheduler_process_func: Callable[..., Any] | None,
    **options: Any,
) -> Any:
    """AROUND hook on `Engine._launch_scheduler_processes`: a launcher's own function loads plug-ins first."""
    function = run_scheduler_process_func
    if function is not None and not str(getattr(function, "__module__", "")).startswith(_SGLANG):
        function = functools.partial(load_plugins_and_run, function)
    return original(cls, server_args, port_args, function, **options)


def load_plugins_and_run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a scheduler process runs: SGLang's plug-ins, and then a launcher's own function."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return function(*arguments, **options)


class LoadsPlugins:
    """An argument of a Ray actor. Where it arrives, it loads SGLang's plug-ins and is `argument`.

    Ray reads the arguments after it has chosen the actor's GPUs. A set-up hook of Ray's workers runs before that, in
    all workers of the job, and would import SGLang, which looks for GPUs.

    Attributes:
        variables: our settings, which Ray does not take from the environment of the process that makes the actor.
    """

    def __init__(self, argument: Any, variables: Mapping[str, str]) -> None:
        self.argument = argument
        self.variables = dict(variables)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrive, (self.argument, self.variables)


def _arrive(argument: Any, variables: Mapping[str, str]) -> Any:
    from sglang.srt.plugins import load_plugins

    for name, value in variables.items():
        os.environ.setdefault(name, value)
    load_plugins()
    return argument


def around_create_scheduler_actor(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """AROUND hook on SGLang's function that makes a Ray actor of a scheduler: the actor loads plug-ins first."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    options["port_args"] = LoadsPlugins(options["port_args"], variables)
    return original(*arguments, **options)
