"""Launchers of schedulers: their processes and actors load plug-ins, with the settings of the launcher."""

from __future__ import annotations

import functools
import os
import pickle
from typing import Any

import pytest

from sgl_prefix_attn.sglang_plugin.compat import launchers, wrap_targets
from sgl_prefix_attn.sglang_plugin.startup import entry, wrapping


def own_scheduler(*arguments: Any) -> tuple[Any, ...]:
    return arguments


def launched_with(function: Any) -> Any:
    calls: list[tuple[Any, ...]] = []
    launchers.around_launch_scheduler_processes(lambda *args: calls.append(args), object, "args", "ports", function)
    ((_, server_args, port_args, launched),) = calls
    assert (server_args, port_args) == ("args", "ports")
    return launched


def test_a_function_of_the_launchers_own_loads_plugins_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: loaded.append("plugins"))
    launched = pickle.loads(pickle.dumps(launched_with(own_scheduler)))
    assert launched(1, 2) == (1, 2)
    assert loaded == ["plugins"]


def test_a_ray_actor_loads_plugins_with_the_settings_of_the_process_that_makes_it(monkeypatch):
    found: list[str | None] = []
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: found.append(os.environ.get("PREFIXPACK_WRAP")))
    monkeypatch.setenv("PREFIXPACK_WRAP", "1")
    sent = launchers.around_create_scheduler_actor(lambda **options: options, gpu_id=0, port_args=[30000])
    arguments = pickle.dumps(sent)
    monkeypatch.delenv("PREFIXPACK_WRAP")
    assert pickle.loads(arguments) == {"gpu_id": 0, "port_args": [30000]}
    assert found == ["1"]


@pytest.mark.parametrize(("arguments", "hooked"), [([], False), (["--use-ray"], True)])
def test_ray_actors_are_hooked_where_they_are_made(arguments, hooked, monkeypatch):
    registered: list[Any] = []
    monkeypatch.setattr(wrapping.hooks, "register", registered.extend)
    monkeypatch.setattr(entry.sys, "argv", ["launch_server", *arguments])
    entry.register()
    assert (wrap_targets.CREATE_RAY_ACTOR in {hook.target for hook in registered}) == hooked


def test_sglangs_own_function_and_none_stay() -> None:
    from sglang.srt.managers.scheduler import run_scheduler_process

    assert launched_with(run_scheduler_process) is run_scheduler_process
    assert launched_with(None) is None
    assert isinstance(launched_with(functools.partial(own_scheduler)), functools.partial)
