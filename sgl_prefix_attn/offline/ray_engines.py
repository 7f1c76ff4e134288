"""Engines on the machines of a Ray cluster: an actor for each, which runs the engine's process beside it.

Needs the `ray` extra. Every machine has this package, SGLang and the model under the same name. Should the process that
uses this die, Ray ends its actors, and the engines die with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sgl_prefix_attn.offline.engines import EngineArguments, EngineError, EngineMain, EnginePool
from sgl_prefix_attn.offline.messages import Checked, Go, Line, Outcome, Planned, Ready, Refused, Steps, Task, together
from sgl_prefix_attn.offline.temporary import RemovedAtEnd

_WAIT_SECONDS = 10.0  # an actor's answer about outcomes, at the latest
_STOP_SECONDS = 20.0
_TASKS = "tasks"


class RayMissingError(RuntimeError):
    """Ray is not installed."""


def connect(address: str) -> Any:
    """Connects to a Ray cluster; returns the module `ray`.

    Args:
        address: as `ray.init` takes it: "auto" for the cluster that this machine belongs to, "local" for one of this
            machine alone, or host:port.

    Raises:
        RayMissingError: Ray is not installed.
        ConnectionError: there is no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise RayMissingError(
            "Ray is not installed: pip install 'sgl-prefix-attn[ray]', or leave --ray away to run on this machine"
        ) from error
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="error")
    return ray


class _Actor:
    """Runs one engine; what `EnginePool` does, on another machine."""

    def __init__(self, main: EngineMain, arguments: EngineArguments) -> None:
        if arguments.log is not None and not arguments.log.parent.exists():
            arguments.log.parent.mkdir(parents=True, exist_ok=True)
            if not arguments.keep_log:
                self._temporary = RemovedAtEnd(arguments.log.parent)
        self._pool = EnginePool(main, [arguments])

    def check(self, lines: Sequence[Line]) -> Checked:
        return self._pool.check(lines)

    def plan(self, go: Go) -> list[Planned | Refused]:
        return list(self._pool.plan(go))

    def wait_ready(self) -> Ready:
        return self._pool.wait_ready()[0]

    def machine(self) -> str:
        import ray

        return f"{ray.util.get_node_ip_address()}, node {ray.get_runtime_context().get_node_id()}"

    def submit(self, task: Task) -> None:
        self._pool.submit(0, task)

    def outcomes(self, submitted: None) -> list[Outcome]:
        return self._pool.outcomes(_WAIT_SECONDS)

    def finish(self) -> list[Steps]:
        return self._pool.finish()

    def stop(self) -> None:
        self._pool.__exit__()


class RayEnginePool:
    """As `EnginePool`, on a cluster that `connect` was called for; engines are spread over its machines.

    When an engine or its machine is gone, `outcomes` first returns what others have finished, and raises when called
    again.

    Args:
        ray: what `connect` returned.
        gpus: GPUs of each engine; each also takes one CPU of its machine.

    Raises:
        ValueError: the cluster's machines have no room for so many engines. (Ray would wait for it without a word.)

    Attributes:
        machines: where each engine runs, in words: address and Ray's id of the node; known once they check.
    """

    def __init__(self, ray: Any, main: EngineMain, engines: Sequence[EngineArguments], gpus: int = 0) -> None:
        self._ray = ray
        room = sum(_room(node["Resources"], gpus) for node in ray.nodes() if node["Alive"])
        if len(engines) > room:
            each = f"{gpus} GPUs and a CPU" if gpus else "a CPU"
            raise ValueError(
                f"{len(engines)} engines, each with {each} of one machine: the Ray cluster's machines have room for "
                f"{room}; start fewer engines, or add machines"
            )
        # Tasks go in, in order, while a call waits for outcomes.
        actor = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD", concurrency_groups={_TASKS: 1})(
            _Actor
        )
        self._actors = [actor.remote(main, arguments) for arguments in engines]
        self._outstanding: list[set[int]] = [set() for _ in engines]
        self._submitted: list[Any] = [None for _ in engines]  # the last call to submit
        self._asked: dict[Any, int] = {}  # calls for outcomes that are under way, with the engine's number
        self._gone: EngineError | None = None
        self.machines: list[str] = ["" for _ in engines]

    def __enter__(self) -> RayEnginePool:
        return self

    def __exit__(self, *exception: object) -> None:
        if not any(exception):
            self._ray.wait([actor.stop.remote() for actor in self._actors], timeout=_STOP_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)

    def __len__(self) -> int:
        return len(self._actors)

    def check(self, lines: Sequence[Line]) -> Checked:
        for number, actor in enumerate(self._actors):
            self.machines[number] = self._get(number, actor.machine.remote())
        calls = [actor.check.remote(lines[number :: len(self)]) for number, actor in enumerate(self._actors)]
        return together([self._get(number, call) for number, call in enumerate(calls)])

    def plan(self, go: Go) -> Iterator[Planned | Refused]:
        calls = [actor.plan.remote(go) for actor in self._actors]
        for number, call in enumerate(calls):
            yield from self._get(number, call)

    def wait_ready(self) -> list[Ready]:
        return [self._get(number, actor.wait_ready.remote()) for number, actor in enumerate(self._actors)]

    def outstanding(self, engine: int) -> int:
        return len(self._outstanding[engine])

    def submit(self, engine: int, task: Task) -> None:
        self._submitted[engine] = self._actors[engine].submit.options(concurrency_group=_TASKS).remote(task)
        self._outstanding[engine].add(task.number)

    def outcomes(self, timeout: float) -> list[Outcome]:
        if self._gone is not None:
            raise self._gone
        asked = set(self._asked.values())
        for number, actor in enumerate(self._actors):
            if self._outstanding[number] and number not in asked:
                # After that submission, or the call would find nothing to wait for.
                self._asked[actor.outcomes.remote(self._submitted[number])] = number
        ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout)
        outcomes = []
        for call in ready:
            number = self._asked.pop(call)
            try:
                finished = self._get(number, call)
            except EngineError as error:
                self._gone = error
                continue
            for outcome in finished:
                self._outstanding[number].discard(outcome.number)
                outcomes.append(outcome)
        if self._gone is not None and not outcomes:
            raise self._gone
        return outcomes

    def finish(self) -> list[Steps]:
        steps: list[Steps] = []
        for number, call in enumerate([actor.finish.remote() for actor in self._actors]):
            with contextlib.suppress(EngineError):  # all results are there
                steps += self._get(number, call)
        return steps

    def _get(self, number: int, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise error.cause from error
            raise EngineError(f"{self._name(number)}: {error.cause}") from error
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"{self._name(number)}, is gone: {error}") from error

    def _name(self, number: int) -> str:
        where = f" ({self.machines[number]})" if self.machines[number] else ""
        return f"engine {number}, of {len(self)} on Ray{where}"


def _room(resources: Mapping[str, float], gpus: int) -> int:
    """Engines that a machine with these resources can run."""
    by_cpus = int(resources.get("CPU", 0))
    return min(by_cpus, int(resources.get("GPU", 0)) // gpus) if gpus else by_cpus
