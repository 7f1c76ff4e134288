"""`sglang.launch_server` whose scheduler raises exceptions in functions of ours when a test asks for them.

The file named by the variable FAULTS has a number for each of PLACES: how many of its next calls raise on rank 0. The
other ranks raise too if there is a file for them (`of_rank`).
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FAULTS = "TEST_FAULTS"
PLUGIN = "sgl_prefix_attn.sglang_plugin."
# Where exceptions are injected, and the parts that may be blamed.
PLACES = {
    "dispatch.step_planner:StepPlanner.decide": {"step"},
    "dispatch.step_planner:StepPlanner._unsupported": {"step"},
    "dispatch.step_planner:StepPlanner._unsupported_batch": {"step"},
    "dispatch.step_router:StepRouter.decide": {"step"},
    "dispatch.step_router:StepRouter.stays_stock": {"step"},
    "dispatch.step_router:StepRouter.stays_packed": {"step"},
    "execution.packed_step:PackedStep.continues_with": {"step"},
    "execution.cpu_executor:CpuExecutor.host_lens": {"step"},
    "execution.cpu_executor:CpuExecutor.begin": {"step"},
    "execution.cpu_executor:CpuExecutor.why_stock": {"step", "request_paths"},
    "execution.cpu_executor:Planner.plan": {"step"},
    "telemetry.counters:Counters.packed": {"step"},
    "prefix.handover:Handover.take": {"step"},
    "execution.layer_registry:LayerRegistry.facts": {"layer"},
    "execution.packed_step:PackedStep.unsupported_call": {"layer"},
    "execution.cpu_executor:CpuExecutor.unsupported_call": {"layer"},
    "execution.cpu_executor:CpuExecutor.attend": {"layer"},
    "execution.cpu_executor:packed_attention": {"layer"},
    "prefix.batch_tracker:BatchTracker.step": {"request_paths"},
    "prefix.batch_tracker:_from_scratch": {"request_paths"},
    "prefix.batch_tracker:_continued": {"request_paths"},
    "prefix.tree_mirror:TreeMirror.forest": {"request_paths"},
    "prefix.tree_mirror:TreeMirror._look_up": {"request_paths"},
    "prefix.one_token:OneTokenSteps.applies": {"one_token_steps", "request_paths"},
    "prefix.one_token:OneTokenSteps.convert": {"one_token_steps"},
    "scheduling.shared_prefill:SharedPrefill.holds_back": {"shared_prefill"},
    "scheduling.shared_prefill:SharedPrefill.admitted": {"shared_prefill"},
    "scheduling.group_scheduler:GroupScheduler.queue_ordered": {"group_scheduling"},
    "scheduling.group_scheduler:GroupScheduler.admitted": {"group_scheduling"},
    "pinning.manager:PinningManager.step": {"pins.run_batch"},
    "pinning.manager:PinningManager.admitted": {"pins.add_one_req"},
    "pinning.manager:PinningManager.on_queue": {"pins.calc_priority"},
    "pinning.manager:PinningManager.on_request_released": {"pins.release_kv"},
    "pinning.metrics:PinningMetrics.update": {"pins.run_batch", "pins.get_internal_state"},
    "telemetry.metrics:MetricsExporter.update": {"metrics"},
    "backend.server_info:process_state": {"server_info"},
    "dispatch.step_router:StepRouter.idle": {"on_idle"},
}


class InjectedError(RuntimeError):
    """An exception that a test has asked for."""


class Faults:
    """The numbers in a file, by place; both processes see them."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._numbers = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int32)

    @classmethod
    def create(cls, path: Path) -> Faults:
        path.write_bytes(bytes(4 * len(PLACES)))
        return cls(path)

    def __getitem__(self, place: str) -> int:
        return int(self._numbers[list(PLACES).index(place)])

    def __setitem__(self, place: str, number: int) -> None:
        self._numbers[list(PLACES).index(place)] = number

    def install(self) -> None:
        """Makes the functions of this process raise."""
        for index, place in enumerate(PLACES):
            module, _, path = place.partition(":")
            owner: Any = importlib.import_module(PLUGIN + module)
            *names, name = path.split(".")
            for part in names:
                owner = getattr(owner, part)
            setattr(owner, name, self._raising(index, getattr(owner, name)))

    def _raising(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            if self._numbers[index] > 0:
                self._numbers[index] -= 1
                raise InjectedError(list(PLACES)[index])
            return original(*args, **kwargs)

        return function


def of_rank(path: Path, rank: int) -> Path:
    """The file of another rank."""
    return path.with_suffix(f".{rank}") if rank else path


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process, with faults in our functions."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    path = of_rank(Path(os.environ[FAULTS]), args[3] if len(args) > 3 else kwargs["tp_rank"])
    if path.exists():
        Faults(path).install()
    return run_scheduler_process(*args, **kwargs)


def main() -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from tests.e2e import injected  # `run_scheduler` under a name that a child can import

    load_plugins()
    launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=injected.run_scheduler)


if __name__ == "__main__":
    main()
