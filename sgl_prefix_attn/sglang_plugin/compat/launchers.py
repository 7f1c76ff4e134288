"""Scheduler processes of launchers that never load SGLang's plug-ins.

SGLang's own `run_scheduler_process` loads them first. A launcher may pass an entry function of its own instead, as
AReaL does. This module runs in both processes, so it imports nothing at its top.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_SGLANG = "sglang."


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
